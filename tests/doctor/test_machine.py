"""Each condition is really there: a low limit, small shared memory, a folder that refuses files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenpipe.doctor import Finding, Verdict
from evenpipe.doctor.finding import Check, fine, run_checks
from evenpipe.doctor.installed import python_and_torch, topology
from evenpipe.doctor.machine import shared_memory, storage

PLUGIN = str(Path(__file__).parents[2] / "plugin")

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at Linux")


def of_a_child(code: str, *before: str, limit: int | None = None) -> list[list[str]]:
    """What ``list(<code>)`` finds in a process of its own, behind the command ``before``, with so many open files."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    program = f"import json; print(json.dumps([[f.check, f.verdict.value, f.said] for f in {code}]))"
    done = subprocess.run(
        [*before, sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([PLUGIN, os.environ.get("PYTHONPATH", "")])},
        preexec_fn=limited,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


def test_too_few_open_files_for_so_many_ranks() -> None:
    code = "__import__('evenpipe.doctor.machine', fromlist=['machine']).open_files({})"
    [low, *_] = of_a_child(code.format(2), limit=256)
    assert low[:2] == ["open files", "problem"]
    assert "ulimit -n is 256" in low[2]
    [enough, *_] = of_a_child(code.format(2), limit=2000)
    assert enough[:2] == ["open files", "fine"]
    [many, *_] = of_a_child(code.format(1000), limit=2000)
    assert many[:2] == ["open files", "problem"]


@linux
def test_small_shared_memory() -> None:
    unshared = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
    if subprocess.run([*unshared, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user cannot mount another /dev/shm")
    code = "__import__('evenpipe.doctor.machine', fromlist=['machine']).shared_memory()"
    [one] = of_a_child(code, *unshared)
    assert one[:2] == ["shared memory", "problem"]
    assert "0.06 GiB" in one[2]
    [here] = shared_memory()
    assert str(Path("/dev/shm")) in here.said


def test_a_folder_for_checkpoints_that_is_not_there_or_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, said in (("none", "does not exist"), ("file", "is no folder")):
        [one] = storage(tmp_path / name, several_nodes=False)
        assert one.verdict is Verdict.PROBLEM
        assert said in one.said
        assert ("mkdir" in (one.remedy or "")) == (name == "none")


def test_the_line_that_makes_a_folder_can_be_pasted(tmp_path: Path) -> None:
    [one] = storage(tmp_path / "a $(b)", several_nodes=False)
    assert one.remedy == f"mkdir -p -- '{tmp_path}/a $(b)', where every node sees it"


@linux
def test_a_folder_that_refuses_files() -> None:
    [one] = storage(Path("/proc/self"), several_nodes=False)
    assert one.verdict is Verdict.PROBLEM
    assert "cannot be written" in one.said


def test_a_good_folder_is_left_as_it_was(tmp_path: Path) -> None:
    space, one = storage(tmp_path, several_nodes=False, checkpoint_bytes=1.0)
    assert (space.check, space.verdict) == ("free space", Verdict.FINE)
    assert one.verdict in (Verdict.FINE, Verdict.NOTE)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_and_a_file_system_of_one_node(tmp_path: Path) -> None:
    space, _ = storage(tmp_path, several_nodes=False, checkpoint_bytes=1e18)
    assert space.verdict is Verdict.PROBLEM
    assert "two checkpoints" in space.said
    if sys.platform.startswith("linux"):
        _, one = storage(tmp_path, several_nodes=True, checkpoint_bytes=1.0)
        assert one.verdict is Verdict.PROBLEM
        assert "each node's own" in one.said


def test_an_old_torch_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch-2.5.1.dist-info").mkdir()
    (tmp_path / "torch-2.5.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.5.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    _, torch = python_and_torch()
    assert torch.verdict is Verdict.PROBLEM
    assert "2.5.1" in torch.said


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \t{path}\tPXB\t0-31\t0
GPU1\t{path}\t X \tPXB\t0-31\t0
NIC0\tPXB\tPXB\t X

Legend:
"""


@pytest.mark.parametrize(("path", "verdict"), [("NV12", Verdict.FINE), ("SYS", Verdict.NOTE), ("PIX", Verdict.FINE)])
def test_paths_between_gpus(path: str, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table").write_text(TOPOLOGY.format(path=path))
    command(tmp_path, f"cat {tmp_path}/table", monkeypatch)
    [one] = topology()
    assert one.verdict is verdict
    assert f"1 {path}" in one.said


def test_a_driver_that_fails_and_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "echo 'No devices were found'; exit 6", monkeypatch)
    [one] = topology()
    assert one.verdict is Verdict.PROBLEM
    assert "No devices were found" in one.said
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    [none] = topology()
    assert none.verdict is Verdict.UNSEEN


def command(folder: Path, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that ``does`` that."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_look_that_never_ends_or_fails_holds_up_no_other() -> None:
    def hangs() -> list[Finding]:
        time.sleep(60)
        return []

    def fails() -> list[Finding]:
        raise OSError(5, "Input/output error")

    started = time.monotonic()
    found, waiting = run_checks(
        [
            Check("slow", hangs, seconds=0.2, waits_for="a dead file server", remedy="remount it"),
            Check("broken", fails, remedy="repair it"),
            Check("good", lambda: [fine("good", "yes")]),
        ]
    )
    assert time.monotonic() - started < 5
    assert waiting
    slow, broken, good = found
    assert (slow.verdict, slow.said, slow.remedy) == (
        Verdict.PROBLEM,
        "no answer from a dead file server within 0.2 s",
        "remount it",
    )
    assert "Input/output error" in broken.said
    assert good.verdict is Verdict.FINE
