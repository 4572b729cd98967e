"""``evenpipe train``: one JSON document, pictures and traces, and bad input in one line before any process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenpipe.cli import training
from evenpipe.cli.main import main
from evenpipe.train.launch import StageFailed
from tests.refusals import refusal

TINY = {
    "--stages": "2",
    "--layers": "2",
    "--hidden": "16",
    "--heads": "2",
    "--seq-length": "16",
    "--micro-batches": "3",
    "--iterations": "2",
}


def words(*flags: str, **changes: str) -> list[str]:
    options = TINY | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return ["train", *(word for option in options.items() for word in option), *flags]


def test_json_is_one_document_and_all_there_is_on_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture, trace, out = tmp_path / "p.png", tmp_path / "t.json", tmp_path / "run.json"
    assert main(words("--json", picture=str(picture), trace=str(trace), out=str(out))) == 0
    captured = capsys.readouterr()
    run = json.loads(captured.out)
    assert json.loads(out.read_text()) == run
    assert run["format"] == "evenpipe.run/1"
    assert [float.fromhex(text) for text in run["losses_hex"]] == run["losses"]
    assert len(run["losses"]) == len(run["iteration_ms"]) == 2
    assert "iteration 1/2" in captured.err
    assert len(bytes.fromhex(run["weights_sha256"])) == 32
    assert len(run["grad_norms"]) == 2
    assert all(norm > 0 for norm in run["grad_norms"])
    assert (run["first_iteration"], run["skipped_iterations"], run["weight_versions_peak"]) == (0, [], 1)
    assert run["retunes"] == []
    assert [(s["weight_version_bytes"], s["held_gradient_bytes"]) for s in run["stages"]] == [(0, 0)] * 2
    keys = {"stage", "peak_live", "peak_saved_bytes", "predicted_peak_bytes", "evicted_bytes"}
    assert [keys <= stage.keys() and stage["stage"] for stage in run["stages"]] == [0, 1]
    assert [stage["peak_live"] for stage in run["stages"]] == [2, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sorted(names) == sorted(2 * ["F0", "F1", "F2", "B0", "B1", "B2"])
    assert "iteration 2/2, loss" in captured.err
    for timeline in (run["timeline"], run["predicted"]["timeline"]):
        assert [sorted(span["action"] for span in spans) for spans in timeline] == 2 * [sorted(set(names))]
    assert [max(nbytes for _, _, nbytes in points) for points in run["memory"]] == [
        stage["peak_saved_bytes"] for stage in run["stages"]
    ]
    assert [len(sizes) for sizes in run["unit_bytes"]] == [1, 1]
    assert {wait["reason"] for wait in run["waits"]} <= {"start", "forward", "backward", "transfer", "itself", "end"}
    assert run["settings"]["micro_batches"] == 3
    assert {"evenpipe", "torch", "megatron-core"} <= run["versions"].keys()


def test_a_bad_option_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 16)
    refused = {
        ("--stages", "3"): "--layers 2: not divisible by --stages 3",
        ("--micro-batches", "0"): "--micro-batches 0: must be",
        ("--chunks", "2", "--micro-batches", "4"): "--layers 2: not divisible by --stages 2 × --chunks 2",
        ("--schedule", "zigzag"): "--schedule zigzag: unknown schedule, choose one of 1f1b, gpipe, ",
        ("--tensor-parallel", "4"): "--tensor-parallel 4: more ranks than --heads 2",
        ("--stages", "1", "--bpipe"): "--bpipe: one stage has no partner",
        ("--data", "no/such/file"): "--data no/such/file: No such file",
        ("--data", str(tmp_path / "short")): "16 bytes, but one sample takes 17",
        ("--picture", "p.jpg"): "p.jpg: pictures are PNG",
        ("--colour", "red"): "--colour",
    }
    for flags, said in refused.items():
        line = refusal(capsys, *words(), *flags)
        assert line.startswith("evenpipe train: error: ") or "--colour" in flags
        assert said in line


def test_a_checkpoint_that_does_not_fit_is_one_line_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words("--json", save=str(tmp_path))) == 0
    capsys.readouterr()
    saved = tmp_path / "iter_0000002"
    assert json.loads((saved / "checkpoint.json").read_text())["format"] == "evenpipe.checkpoint/2"
    refused = {
        ("--hidden", "32"): f"--hidden 32: {saved} was saved with --hidden 16: use that, or another --load",
        (): f"--iterations 2: {saved} has 2 behind it: use more, or leave --load out",
        ("--load", str(tmp_path / "none")): f"--load {tmp_path}/none: no checkpoint there (latest: No such file or",
    }
    for flags, said in refused.items():
        assert refusal(capsys, *words(load=str(tmp_path)), *flags).startswith(f"evenpipe train: error: {said}")


def test_a_run_that_this_host_cannot_hold_is_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words(hidden="1048576", schedule="kfkb", group_size="9"))
    warning, refusal = capsys.readouterr().err.splitlines()
    assert warning.startswith("evenpipe train: warning: --group-size 9: a batch has 3 micro-batches, which make one ")
    assert "this run holds at least " in refusal
    plan = tmp_path / "P.json"
    main(["partition", "--model", "bert-large", "--small", "--stages", "2", "--out", str(plan)])
    document = json.loads(plan.read_text())
    for stage in document["stages"]:
        stage["peak_bytes"] = stage["peak_bytes_before"] = 2**50
    document["limit_bytes"] = 2**51
    plan.write_text(json.dumps(document))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--partition", str(plan), "--iterations", "1"])
    line = capsys.readouterr().err
    assert f"--partition {plan}: this run holds at least 2,097,152.0 GiB in 2 processes, and this host" in line


def test_a_run_that_fails_is_an_object_with_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise StageFailed("stage 1 failed at F0: ValueError: no", "Traceback of stage 1\n")

    monkeypatch.setattr(training, "run_cases", fails)
    with pytest.raises(SystemExit) as caught:
        main(["train", "--stages", "2", "--layers", "2", "--json"])
    said = capsys.readouterr()
    assert caught.value.code == 1
    assert json.loads(said.out) == {"error": "stage 1 failed at F0: ValueError: no"}
    assert said.err == "Traceback of stage 1\nevenpipe train: stage 1 failed at F0: ValueError: no\n"


def test_quiet_shows_no_progress_and_all_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--engine", "module", "--quiet")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "peak saved MiB" in captured.out
