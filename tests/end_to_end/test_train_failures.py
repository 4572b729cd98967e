"""What happens when a stage raises, dies or is stopped: the run ends soon, says why last, and leaves no process."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds a session's processes in /proc")

TINY = {
    "--stages": "2",
    "--layers": "2",
    "--hidden": "16",
    "--heads": "2",
    "--seq-length": "16",
    "--micro-batches": "4",
    "--iterations": "100000",
}
SECONDS = 15


class Run:
    """`evenpipe train` in a session of its own, so that all its processes can be told from others."""

    def __init__(self, *flags: str, **changes: str) -> None:
        options = TINY | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        words = [word for option in options.items() for word in option]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evenpipe", "train", *words, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_first_iteration(self) -> None:
        assert self.process.stderr is not None
        said = [self.process.stderr.readline()]
        while said[-1] and ": iteration 1/" not in said[-1]:
            said.append(self.process.stderr.readline())
        assert said[-1], "".join(said)

    def processes(self) -> dict[int, int]:
        """Parents of all processes of the session, zombies aside."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(session) == self.process.pid and state != "Z":
                found[int(path.parent.name)] = int(parent)
        return found

    def training(self) -> list[int]:
        """The training processes: grandchildren of the command, started by its fork server."""
        processes = self.processes()
        return sorted(pid for pid, parent in processes.items() if processes.get(parent) == self.process.pid)

    def ending(self) -> tuple[int, str]:
        """Exit status and last line on standard error, once nothing is left; both within SECONDS from now."""
        deadline = time.monotonic() + SECONDS
        _, said = self.process.communicate(timeout=SECONDS)
        while self.processes():
            assert time.monotonic() < deadline, f"left behind: {self.processes()}"
            time.sleep(0.05)
        return self.process.returncode, said.splitlines()[-1] if said else ""

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    """A run that trains, its first iteration behind it."""
    runs = []

    def start(*flags: str, **changes: str) -> Run:
        runs.append(Run(*flags, **changes))
        runs[-1].wait_for_first_iteration()
        return runs[-1]

    yield start
    for started in runs:
        started.end()


@pytest.mark.parametrize(("engine", "stage", "action"), [("megatron", 0, "F2"), ("evenpipe", 1, "B3")])
def test_a_stage_that_raises_ends_the_run_with_its_error_as_the_last_line(
    run: Callable[..., Run], engine: str, stage: int, action: str
) -> None:
    status, line = run(engine=engine, fault_at=f"{stage}:{action}").ending()
    assert line == (
        f"evenpipe train: stage {stage} failed at {action}: RuntimeError: rehearsed failure, asked for by --fault-at"
    )
    assert status == 1


@pytest.mark.parametrize(("stage", "action"), [(0, "E1"), (3, "A1@0")])
def test_a_stage_that_raises_during_a_transfer_does_too(run: Callable[..., Run], stage: int, action: str) -> None:
    status, line = run("--bpipe", stages="4", layers="4", fault_at=f"{stage}:{action}").ending()
    assert line.startswith(f"evenpipe train: stage {stage} failed at {action}: RuntimeError: rehearsed failure")
    assert status == 1


def test_a_process_that_dies_without_a_word_is_named_rather_than_the_peers_that_lost_it(
    run: Callable[..., Run],
) -> None:
    running = run()
    os.kill(running.training()[1], signal.SIGKILL)
    status, line = running.ending()
    assert re.fullmatch(r"evenpipe train: stage \d failed: its process was killed by SIGKILL", line)
    assert status == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_ends_all_processes(run: Callable[..., Run], number: signal.Signals) -> None:
    running = run()
    os.kill(running.process.pid, number)
    status, line = running.ending()
    assert line == f"evenpipe train: stopped by {number.name}"
    assert status == 128 + number


def test_no_process_outlives_a_command_that_was_killed(run: Callable[..., Run]) -> None:
    running = run()
    assert len(running.training()) == 2
    running.process.kill()
    status, _ = running.ending()
    assert status == -signal.SIGKILL
