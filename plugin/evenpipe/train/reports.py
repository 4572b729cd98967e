"""What a training process reports to the command that has started it, and the signals by which either is stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from evenpipe.train.result import RunResult

__all__ = ["STOPPING", "Failure", "Iteration", "Note", "Report", "Results", "Saved", "Stopping"]

#: What ends a run politely: a scheduler, Ctrl-C, a terminal that is closed.
STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Iteration(NamedTuple):
    """One finished iteration of case `case`, both counted from 0; reported by the process that knows the loss."""

    iteration: int
    loss: float
    ms: float
    case: int = 0


class Failure(NamedTuple):
    """An error in one process. `clock` (seconds, monotonic) is the same clock in all processes of a machine.

    `of_options`: `error` is a line that names the flag with which it was asked for.
    """

    clock: float
    stage: int
    position: str
    error: str
    traceback: str
    of_options: bool = False

    def __str__(self) -> str:
        return f"stage {self.stage} failed at {self.position}: {self.error}"


class Saved(NamedTuple):
    """A checkpoint is complete, in `folder`."""

    folder: Path


class Note(NamedTuple):
    """Something that the user should know, in one line."""

    text: str


class Stopping(NamedTuple):
    """A process ends early, as the signal `number` has asked it to."""

    number: int


class Results(NamedTuple):
    """Of all cases; from rank 0."""

    runs: list[RunResult]


Report: TypeAlias = Iteration | Failure | Saved | Note | Stopping | Results
