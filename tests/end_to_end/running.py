"""`evenpipe train` as a process of its own, to be stopped, killed and looked at."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ending", "Run", "command"]

TINY = {
    "--stages": "2",
    "--layers": "2",
    "--hidden": "16",
    "--heads": "2",
    "--seq-length": "16",
    "--micro-batches": "4",
    "--iterations": "100000",
}
SECONDS = 15.0


class Ending(NamedTuple):
    """Of a command: its exit status, and the last line that it wrote to standard error."""

    status: int
    line: str


def command(fault: tuple[str, ...] = ()) -> list[str]:
    """`evenpipe train`, in which a failure is rehearsed if one is given."""
    module = ("tests.rig.faults", *fault) if fault else ("evenpipe",)
    return [sys.executable, "-m", *module, "train"]


class Run:
    """`evenpipe train` in a session of its own, so that all its processes can be told from others.

    `base`: its options, if not those of a tiny model. `fault`: a failure that is rehearsed, STAGE:ACTION and kind.
    In a `with` statement it trains, its first iteration behind it, and afterwards nothing of it is left.
    """

    def __init__(
        self,
        *flags: str,
        base: Mapping[str, str] = TINY,
        fault: tuple[str, ...] = (),
        **changes: str,
    ) -> None:
        options = {**base} | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        self._started = time.monotonic()
        words = [word for option in options.items() for word in option]
        self.process = subprocess.Popen(
            [*command(fault), *words, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_first_iteration(self) -> None:
        assert self.process.stderr is not None
        said = [self.process.stderr.readline()]
        while said[-1] and ": iteration " not in said[-1]:
            said.append(self.process.stderr.readline())
        assert said[-1], "".join(said)

    def __enter__(self) -> "Run":
        try:
            self.wait_for_first_iteration()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

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
        """The training processes by rank: grandchildren of the command, started in turn by its fork server."""
        processes = self.processes()
        return sorted(pid for pid, parent in processes.items() if processes.get(parent) == self.process.pid)

    def stop(self, stage: int) -> None:
        """Have the process of that stage stand still."""
        os.kill(self.training()[stage], signal.SIGSTOP)

    def ending(self, patience: float = SECONDS) -> Ending:
        """How it ended, once nothing is left; within `patience` from now, or what its start took where that is more."""
        now = time.monotonic()
        patience = max(patience, now - self._started)
        deadline = now + patience
        _, said = self.process.communicate(timeout=patience)
        while self.processes():
            assert time.monotonic() < deadline, f"left behind: {self.processes()}"
            time.sleep(0.05)
        return Ending(self.process.returncode, said.splitlines()[-1] if said else "")

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()
