"""`make gpu` without a GPU: it says so; its parts can be tried on the CPU, and one that fails does not end the rest."""

import json
import os
import re
import resource
import subprocess
import sys
import warnings
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import gpus, identity, itself, loop, looped, parts, registry, report, training
from evenpipe.schedule import Size, build, names
from tests.end_to_end.gpu_parts import COMMAND

ROOT = Path(__file__).parents[2]
IN_TURN, CONTROL = "torch.cuda.synchronize around every action", "receives posted ahead, which must hang"
CASES = ("1f1b with BPipe", "2bw with BPipe", "kfkb", "interleaved", "v-half")
REFERENCE = "what others are compared with"
#: What a part may say of a case.
RIGHT = re.compile(rf"{REFERENCE}|(the (bits|losses|first loss)|other bits, as must be|none|ended)( of .+)?")
#: By part: cases among others that it has to come to, or to name as not checked.
EXPECTED = {
    "bit-identity": {f"{name}, {precision}" for name in CASES for precision in ("bf16", "fp32")},
    "bit-identity in Megatron": {"1f1b, bf16", "kfkb with BPipe, fp32", "2bw, bf16"},
    "NCCL with itself": {"1f1b with BPipe", "kfkb with BPipe", "v-half"},
    "NCCL with itself, torch.cuda._sanitizer": {"torch.cuda._sanitizer"},
    "NCCL with itself, Transformer Engine": {"Transformer Engine's layers, FP8"},
    "torch.cuda.synchronize around every action": {"1f1b with BPipe", "2F2B with BPipe", "2bw", "gpipe", "v-half"},
    "BPipe": {"iteration with BPipe / without", "1f1b with BPipe: an iteration"},
    "BPipe in Megatron": {"iteration with BPipe / without", "1f1b with BPipe", "4F4B with BPipe: an iteration"},
}
#: By part, if not four: of two, BPipe has nothing to evict under 1F1B.
STAGES = {"bit-identity in Megatron": 2, "BPipe in Megatron": 2}
PAGE = "before\n<!-- what `make gpu` found -->\nold\n<!-- end of what `make gpu` found -->\nafter\n"


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=850,
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
    part = next(part for part in registry.PARTS if part.name == name)._replace(seconds=seconds, needs=())

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


def test_what_a_part_has_found_is_written_before_the_next(tmp_path, monkeypatch, capsys):
    """The third is interrupted."""
    seen = []

    def carried_out(part, *_):
        if (tmp_path / "gpu.json").exists():
            found = json.loads((tmp_path / "gpu.json").read_text())
            seen.append([(one["part"], one["status"]) for one in found["parts"]])
            assert f"| {found['parts'][0]['part']} | it | 7 MiB |" in (tmp_path / "gpu.md").read_text()
        if len(seen) == 2:
            raise KeyboardInterrupt
        return {**parts.not_reached(part), "status": "measured", "why": None, "rows": [case("it", 7) | {"unit": "MiB"}]}

    monkeypatch.setattr(gpu, "carry_out", carried_out)
    names = ["links", "BPipe", "device"]
    monkeypatch.setattr(sys, "argv", ["gpu", "--place", "cpu", "--into", str(tmp_path), "--only", *names])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 130
    assert "interrupted after 2 parts" in capsys.readouterr().err
    first, second = seen
    statuses = ["measured", "skipped", "skipped"]
    assert [status for _, status in first] == statuses
    assert [status for _, status in second] == ["measured", "measured", "skipped"]
    assert "skipped: the run ended before it" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize("trouble", ["none", "page", "room"])
def test_a_folder_that_takes_no_results_is_named_before_anything_is_measured(tmp_path, monkeypatch, capsys, trouble):
    into = tmp_path / "none" if trouble == "none" else tmp_path
    if trouble == "page":
        (into / "gpu.md").write_text("no comments")
    monkeypatch.setattr(gpu, "carry_out", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(sys, "argv", ["gpu", "--place", "cpu", "--into", str(into)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trouble == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(SystemExit) as ended:
            gpu.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(said.splitlines()) == 1
    expected = {"none": "there is no folder", "page": "no <!-- what", "room": "no room for a MiB (File too large)"}
    assert expected[trouble] in said
    assert str(into) in said


def test_stages_in_one_process_have_the_gradients_of_a_loop_and_a_wait_that_is_missing_shows(monkeypatch):
    """Messages of links that lead from the process to itself are late, and memory that has left is NaN."""
    made = partial(itself._layers, SimpleNamespace(pick=lambda _, on_cpu: on_cpu, device=torch.device("cpu")))
    boundary, loops = torch.empty(1, 32, 32), loop.Loops(torch.device("cpu"))
    evicting = looped.Case(build("1f1b", Size(4, 6), True), made(), boundary)
    assert looped.gradients_of(evicting, loops).bits == looped.without_pipeline(evicting)
    checkpointed = evicting._replace(made=made(True))
    assert looped.gradients_of(checkpointed, loops).bits == looped.without_pipeline(checkpointed)
    monkeypatch.setattr(loop, "_DELAY_SECONDS", 0.05)  # so that a copy is overtaken on a busy machine, too
    with looped.unwaited():
        assert looped.gradients_of(evicting, loops).bits != looped.without_pipeline(evicting)


def test_a_stage_that_fails_does_not_leave_the_others_waiting():
    class Failing(torch.nn.Linear):
        def forward(self, value):
            raise ValueError("the third part")

    modules = [torch.nn.Linear, torch.nn.Linear, Failing, torch.nn.Linear]
    case = looped.Case(build("1f1b", Size(4, 4)), lambda position: modules[position](8, 8), torch.empty(2, 8))
    with pytest.raises(ValueError, match="the third part"):
        looped.gradients_of(case, loop.Loops(torch.device("cpu")))


def test_what_a_machine_lacks_is_in_the_list_of_what_was_not_checked(monkeypatch):
    monkeypatch.setattr(registry, "nccl_version", lambda: (2, 29, 7))
    by_name = {part.name: part for part in registry.PARTS}
    entry = parts.carry_out(by_name["a script of DeepSpeed"], "shared", 4, 100, print)
    assert (entry["status"], entry["why"]) == ("skipped", "NCCL 2.29.7 takes no two ranks on one GPU, as 2.30 does")
    found = report.document("shared", 1, [entry])
    line = f"{by_name['a script of DeepSpeed'].checks}: {entry['why']} (a script of DeepSpeed)"
    assert found["unchecked"] == [line]
    assert f"| a script of DeepSpeed | | {entry['status']}: {entry['why']} | |" in report.table(found)
    assert registry.place_of(1) == "shared"
    monkeypatch.setattr(registry, "nccl_version", lambda: (2, 30, 3))
    assert registry.place_of(1) == "nccl-shared"
    assert registry.lacking(by_name["a script of DeepSpeed"], "nccl-shared") is None
    monkeypatch.setenv("MEGATRON_LM", "/nowhere")
    monkeypatch.setattr(registry, "ROOT", Path("/nowhere"))
    why = registry.lacking(by_name["a script of Megatron-LM"], "nccl")
    assert why == "MEGATRON_LM names no checkout of Megatron-LM"


def test_the_page_is_made_of_the_document_beside_it():
    found = json.loads((ROOT / "docs" / "gpu.json").read_text())
    assert report.table(found) in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.long
def test_a_part_that_fails_is_recorded_and_the_others_go_on(tmp_path):
    found, page = measured(tmp_path, "--only", "links", "device", GLOO_SOCKET_IFNAME="no-such-interface")
    assert found["links"]["status"] == "failed"
    assert "no-such-interface" in found["links"]["why"]
    assert found["device"]["status"] == "measured"
    rows = found["device"]["rows"]
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


@pytest.fixture(scope="module")
def carried_out():
    """Carry out a part on CPU places, once for all parts that differ only in their environment."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(COMMAND, cwd=ROOT, env=environment, text=True, stdin=-1, stdout=-1) as process:

        @cache
        def once(module, argument, ranks):
            name = next(part.name for part in registry.PARTS if (part.module, part.argument) == (module, argument))
            print(ranks, name, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield lambda part, ranks: once(part.module, part.argument, ranks)
        process.stdin.close()


@pytest.mark.long
@pytest.mark.parametrize("part", registry.PARTS, ids=lambda part: part.name)
def test_a_part_is_carried_out_on_the_cpu_or_says_what_is_lacking(part, carried_out):
    entry = carried_out(part, STAGES.get(part.name, 4))
    if entry["status"] == "skipped":
        assert entry["why"] == registry.lacking(part, "cpu")
        return
    assert entry["status"] == "measured", entry
    words = {row["what"]: row["value"] for row in entry["rows"] if isinstance(row["value"], str)}
    assert all(RIGHT.fullmatch(value) for value in words.values()) or part.must_hang, words
    assert set(words.values()) == {"HUNG: nothing for 20 s"} or not part.must_hang, words
    references = {what.partition(",")[0] for what, value in words.items() if value == REFERENCE}
    assert part.module == "scripts" or references <= {"one stage", "2bw"}
    measured = [row for row in entry["rows"] if row["what"] not in words]
    assert all(row["unit"] and np.min(row["value"]) >= 0 for row in measured), measured
    every = {row["what"] for row in entry["rows"]} | {left["unchecked"] for left in entry["unchecked"]}
    assert EXPECTED.get(part.name, set()) <= every
    assert words or measured
    if part.module == "bpipe":
        without, balanced = (row for row in measured if row["what"].endswith(": saved activations"))
        assert max(balanced["value"]) < max(without["value"])
