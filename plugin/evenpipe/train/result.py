"""What training processes report to the command that has started them: each iteration, failures, and the result."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from evenpipe.simulate import MemoryPoint, Span
from evenpipe.tuner.tuner import Retune

__all__ = [
    "STOPPING",
    "Failure",
    "Iteration",
    "Note",
    "Report",
    "Results",
    "RunResult",
    "Saved",
    "StageMeasurement",
    "Stopping",
]

#: What ends a run politely: a scheduler, Ctrl-C, a terminal that is closed.
STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StageMeasurement(NamedTuple):
    """One stage over all iterations: peaks of own plus accepted saved activations, and bytes evicted per iteration.

    `peak_live` counts units (micro-batch × model chunk). What follows are bytes of one process: its trainable
    parameters in their own dtype, other versions of them, gradients kept until their step; and, with all that the
    optimizer keeps, whatever stays from batch to batch (`static_bytes`, the second version left out). `message_bytes`:
    of what a micro-batch brings from the stage before and takes to the next, where an engine tells it.
    """

    peak_live: int
    peak_saved_bytes: int
    evicted_bytes: int
    parameter_bytes: int
    weight_version_bytes: int
    held_gradient_bytes: int
    static_bytes: int
    message_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """The most that the stage has held at once: saved activations, what stays, and a message each way."""
        return self.peak_saved_bytes + self.static_bytes + self.weight_version_bytes + self.message_bytes


@dataclass(frozen=True)
class RunResult:
    """`losses` are averages over micro-batches and data-parallel replicas, one per iteration, as is `iteration_ms`.

    So are `grad_norms`, before clipping, with None for a skipped step. Iterations count from 0; the first of this run
    is `first_iteration`, which is not 0 where a checkpoint was loaded. `weights_sha256` covers every parameter of every
    stage and tensor-parallel rank. `unit_bytes[s][c]` is what one micro-batch saves in chunk c of stage s,
    `left_bytes[s][c]` what its input gradient leaves of that for its weight gradient. `spans[s]` are the actions of
    stage s in the last iteration, in order of their start, in milliseconds from the first of all, and `memory[s]` what
    it held meanwhile. `retunes` are decisions on group and micro-batch sizes, `predicted_saved_bytes[s]` the highest
    peak of saved activations that was predicted for them; both are empty where the options decide.
    """

    losses: tuple[float, ...]
    weights_sha256: str
    iteration_ms: tuple[float, ...]
    stages: tuple[StageMeasurement, ...]
    unit_bytes: tuple[tuple[int, ...], ...]
    left_bytes: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[Span, ...], ...]
    memory: tuple[tuple[MemoryPoint, ...], ...]
    first_iteration: int
    grad_norms: tuple[float | None, ...]
    skipped_iterations: tuple[int, ...]
    weight_versions_peak: int
    retunes: tuple[Retune, ...]
    predicted_saved_bytes: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the part of the document `evenpipe.run/1` that was measured. What is not finite is null there, but in
        `losses_hex`; `evenpipe.train.predict.run_document` adds the rest."""
        return {
            "format": "evenpipe.run/1",
            "first_iteration": self.first_iteration,
            "losses": _finite(self.losses),
            "losses_hex": [loss.hex() for loss in self.losses],
            "grad_norms": _finite(self.grad_norms),
            "skipped_iterations": list(self.skipped_iterations),
            "weights_sha256": self.weights_sha256,
            "weight_versions_peak": self.weight_versions_peak,
            "retunes": [retune._asdict() for retune in self.retunes],
            "iteration_ms": list(self.iteration_ms),
            "stages": [{"stage": stage, **measured._asdict()} for stage, measured in enumerate(self.stages)],
            "unit_bytes": [list(chunks) for chunks in self.unit_bytes],
            "left_bytes": [list(chunks) for chunks in self.left_bytes],
            "timeline": [[span.to_json() for span in spans] for spans in self.spans],
            "memory": [[list(point) for point in points] for points in self.memory],
        }


def _finite(values: Iterable[float | None]) -> list[float | None]:
    return [value if value is not None and math.isfinite(value) else None for value in values]


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
    """The results of all cases; from rank 0."""

    runs: list[RunResult]


Report: TypeAlias = Iteration | Failure | Saved | Note | Stopping | Results
