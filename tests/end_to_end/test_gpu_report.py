"""`make gpu` without a GPU: it says so; its parts can be tried on the CPU, and one that fails does not end the rest."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import gpus, identity, parts, report, training
from evenpipe.schedule import names

ROOT = Path(__file__).parents[2]
IN_TURN, CONTROL = "torch.cuda.synchronize around every action", "receives posted ahead, which must hang"
PAGE = "before\n<!-- what `make gpu` found -->\nold\n<!-- end of what `make gpu` found -->\nafter\n"


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def measured(folder, *arguments, **environment):
    """The document by part, and the page."""
    (folder / "gpu.md").write_text(PAGE)
    finished = run("--place", "cpu", "--into", str(folder), *arguments, **environment)
    assert finished.returncode == 0, finished.stderr
    found = json.loads((folder / "gpu.json").read_text())
    assert found["format"] == "evenpipe.gpu/1"
    return {part["part"]: part for part in found["parts"]}, (folder / "gpu.md").read_text()


def case(what, value):
    return {"what": what, "value": value}


def written_by(monkeypatch, name, *ranks, seconds=1.5):
    """The entry of a part, and the table with it, whose ranks write these rows and end, or hang if the last is None."""
    part = next(part for part in parts.PARTS if part.name == name)._replace(seconds=seconds, needs="")

    def start(part, place, rank, count, folder):
        lines = [json.dumps(row) + "\n" for row in ranks[rank] if row is not None]
        (folder / f"rows-{rank}.jsonl").write_text("".join(lines))
        return subprocess.Popen(["sleep", "60" if ranks[rank][-1] is None else "0"], start_new_session=True)

    monkeypatch.setattr(parts, "_start", start)
    shown = []
    entry = parts.carry_out(part, "nccl", len(ranks), 100, shown.append)
    return entry, report.table(report.document("nccl", 1, [entry])), shown


@pytest.mark.parametrize("hanging", [0, 1])
def test_one_ranks_end_does_not_hide_that_another_hangs(monkeypatch, hanging):
    first = [case("1f1b", "under way"), case("1f1b", "ended")]
    ranks = [[*first, case("2bw", "under way"), case("2bw", "ended"), None] for _ in range(2)]
    ranks[hanging][3] = None
    expected = {"expected": ["1f1b", "2bw", "gpipe"]}
    entry, table, shown = written_by(monkeypatch, IN_TURN, [expected, *ranks[0]], ranks[1])
    assert entry["rows"] == [case("1f1b", "ended"), case("2bw", "HUNG: nothing for 2 s")]
    assert entry["unchecked"] == [{"unchecked": "gpipe", "why": "not reached: one before it hung"}]
    assert "- gpipe: not reached: one before it hung" in table
    assert not any(line.startswith("2bw: ended") for line in shown)


def test_a_case_that_a_rank_has_not_begun_has_not_ended(monkeypatch):
    entry, *_ = written_by(monkeypatch, IN_TURN, [case("1f1b", "under way"), case("1f1b", "ended")], [None])
    assert entry["rows"] == [case("1f1b", "HUNG: nothing for 2 s")]


def test_a_control_that_ends_has_failed(monkeypatch):
    entry, table, _ = written_by(monkeypatch, CONTROL, *[[case("1f1b", "under way"), case("1f1b", "ended")]] * 2)
    assert (entry["status"], entry["rows"]) == ("failed", [case("1f1b", "ENDED")])
    assert f"| {CONTROL} | 1f1b | ENDED | |" in table.replace("|  |", "| |")
    assert f"| {CONTROL} | | failed: it ended, but had to hang" in table
    entry, *_ = written_by(monkeypatch, CONTROL, *[[case("1f1b", "under way"), None]] * 2)
    assert (entry["status"], entry["rows"]) == ("measured", [case("1f1b", "HUNG: nothing for 2 s")])


def test_of_a_part_whose_time_ends_rows_are_kept_and_what_is_left_is_named(monkeypatch):
    begun = [{"expected": ["a", "b", "c", "d"]}, case("a", "the bits"), case("b", "under way")]
    left = {"unchecked": "d", "why": "there is none"}
    entry, table, _ = written_by(monkeypatch, "bit-identity", [*begun, left, None], [None])
    assert entry["status"] == "failed"
    assert entry["why"].startswith("not done after ")
    assert entry["rows"] == [case("a", "the bits"), case("b", "not done")]
    assert entry["unchecked"] == [left, {"unchecked": "c", "why": f"not reached: {entry['why']}"}]
    assert f"- c: not reached: {entry['why']} (bit-identity)" in table


@pytest.mark.parametrize("stages", [2, 4])
def test_a_run_in_which_bpipe_would_evict_nothing_is_not_made(stages):
    left = []
    rank = SimpleNamespace(unchecked=lambda what, why: left.append((what, why)))

    def made(**asked):
        given = {"engine": "module", "layers": 8, "stages": stages, "bpipe": True, **asked}
        return training.options_of(rank, "it", **given) is not None

    assert made(schedule="kfkb", group_size=training.evicting_group(stages))
    assert not left
    assert made() == made(schedule="2bw") == made(schedule="interleaved", chunks=2) == (stages == 4)
    assert left == [("it", "of 2 stages BPipe has nothing to evict under this schedule")] * (3 if stages == 2 else 0)


def test_of_bit_identity_what_matters_most_comes_first(monkeypatch):
    compared, expected = [], []
    monkeypatch.setattr(identity, "_compare", lambda rank, what, *_: compared.append(what))
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    rank = SimpleNamespace(place="nccl", ranks=4, device=torch.device("cpu"), expect=expected.extend)
    rank.pick, rank.unchecked = lambda on_gpu, _: on_gpu, lambda *_: None
    identity.run(rank, "module")
    assert compared == expected
    assert compared[:3] == ["one stage, bf16", "1f1b, bf16", "1f1b with BPipe, bf16"]
    assert compared.index("2bw, bf16") < compared.index("2bw with BPipe, bf16") < compared.index("gpipe, bf16")
    assert {f"{name}{more}, fp32" for name in names() for more in ("", " with BPipe")} <= set(compared)


def test_without_a_gpu_it_says_so_in_one_line():
    finished = run()
    assert finished.returncode == 1
    assert len(finished.stderr.splitlines()) == 1
    assert "finds no GPU here" in finished.stderr


def test_a_torch_that_does_not_fit_the_driver_is_not_taken_for_no_gpu(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 470.57.02\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    line = gpus.why_none("")
    assert "though there is one with driver 470.57.02: this torch is built without CUDA: install a build" in line
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "it does not serve this torch, which is built for CUDA 13.0: update the driver" in gpus.why_none("")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.why_none("").endswith("CUDA_VISIBLE_DEVICES='' may hide it: unset it")


def test_what_torch_says_of_the_driver_is_told(monkeypatch):
    def too_old():
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update "
            "your GPU driver (Triggered internally at CUDAFunctions.cpp:109.)",
            stacklevel=2,
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    count, warned = gpus.usable()
    assert (count, warned) == (0, "The NVIDIA driver on your system is too old (found version 11040)")
    line = gpus.why_none(warned)
    assert f"CUDA 13.0 ({warned}): update the driver, or install a torch built for" in line
    assert "\n" not in line


def test_what_runs_on_the_cpu_is_not_written_into_the_docs():
    finished = run("--place", "cpu")
    assert finished.returncode == 1
    assert "must not be written into docs" in finished.stderr


@pytest.mark.long
def test_a_part_that_fails_is_recorded_and_the_others_go_on(tmp_path):
    found, page = measured(tmp_path, "--only", "links", "device", GLOO_SOCKET_IFNAME="no-such-interface")
    assert found["links"]["status"] == "failed"
    assert "no-such-interface" in found["links"]["why"]
    assert found["device"]["status"] == "measured"
    rows = found["device"]["rows"]
    assert len(rows) > 5
    assert all(row["unit"] and row["value"] > 0 for row in rows)
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    assert all(row["what"] in page for row in rows)


@pytest.mark.long
def test_what_there_is_no_time_for_is_told(tmp_path):
    found, page = measured(tmp_path, "--only", "device", "links", "--seconds", "1.5")
    assert found["links"]["status"] == "failed"
    assert found["links"]["why"].startswith("not done after ")
    assert (found["device"]["status"], found["device"]["why"]) == ("skipped", "no time was left")
    assert "skipped: no time was left" in page


@pytest.mark.long
def test_synchronised_stages_end_but_with_receives_posted_ahead(tmp_path):
    """On the CPU a synchronisation waits for the streams of all links, as on a GPU."""
    found, page = measured(tmp_path, "--only", IN_TURN, CONTROL)
    assert [row["value"] for row in found[IN_TURN]["rows"]] == ["ended"] * 7
    assert [row["value"] for row in found[CONTROL]["rows"]] == ["HUNG: nothing for 20 s"]
    assert {"1f1b with BPipe", "2F2B with BPipe", "2bw"} <= {row["what"] for row in found[IN_TURN]["rows"]}
    assert "1f1b with BPipe" in page


@pytest.mark.long
def test_of_two_stages_bpipe_is_measured_where_it_evicts():
    part = next(part for part in parts.PARTS if part.name == "BPipe")
    entry = parts.carry_out(part, "cpu", 2, 200, print)
    assert entry["status"] == "measured"
    rows = {row["what"]: row for row in entry["rows"]}
    assert "iteration with BPipe / without" in rows
    assert not any(what.startswith("1f1b") for what in rows)
    without, balanced = (rows[f"4F4B{more}: saved activations"] for more in ("", " with BPipe"))
    assert max(balanced["value"]) < max(without["value"])
    assert {left["unchecked"]: left["why"] for left in entry["unchecked"]}["1f1b with BPipe"].startswith("of 2 stages")


@pytest.mark.long
def test_every_schedule_of_plain_torch_is_compared_bit_for_bit(tmp_path):
    found, _ = measured(tmp_path, "--only", "bit-identity")
    rows = found["bit-identity"]["rows"]
    values = {row["what"]: row["value"] for row in rows}
    for precision in ("fp32", "bf16"):
        for alone in ("one stage", "2bw"):
            assert values.pop(f"{alone}, {precision}") == "what others are compared with"
        assert values.pop(f"2bw with BPipe, {precision}") == "the bits of 2bw"
    assert set(values.values()) == {"the bits of one stage"}
    assert {"1f1b with BPipe, bf16", "kfkb, fp32", "interleaved, bf16", "v-half, fp32"} <= set(values)
    assert any("2bw" in left["unchecked"] for left in found["bit-identity"]["unchecked"])
