"""What stages need and take for micro-batches of any size, from measurements of one or two sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evenpipe.planner.estimate import StageTimes
from evenpipe.planner.memory import StageMemory

__all__ = ["Measured", "growth", "stage_memory", "stage_times"]


class Measured(NamedTuple):
    """One process of one stage with micro-batches of one size: milliseconds and bytes of a micro-batch.

    Each micro-batch holds ``each_bytes`` until its backward, and all of them together ``shared_bytes`` (as a mask);
    ``message_bytes`` travel to a neighbour, and ``workspace_bytes`` are kept for the one that is being computed.
    ``static_bytes`` stay from batch to batch.
    """

    forward_ms: float
    backward_ms: float
    each_bytes: float
    shared_bytes: float
    message_bytes: float
    workspace_bytes: float
    static_bytes: float


def stage_times(measured: Sequence[Measured]) -> StageTimes:
    """What the stages compute for micro-batches of the size that was measured."""
    return StageTimes(tuple(one.forward_ms for one in measured), tuple(one.backward_ms for one in measured))


def stage_memory(small: Measured, size: int, large: Measured | None = None, larger: int = 0) -> StageMemory:
    """What a stage needs for any size, from micro-batches of ``size`` samples and, if measured, of ``larger`` ones.

    What micro-batches share is that of the smaller ones. Without larger ones, all that each of them holds is taken to
    grow with its samples.
    """
    fixed, by_sample = 0, _by(small.each_bytes, size)
    if large is not None:
        fixed, by_sample = growth(small.each_bytes, size, large.each_bytes, larger)
    return StageMemory(
        static_bytes=int(small.static_bytes),
        shared_bytes=int(small.shared_bytes),
        fixed_bytes=fixed,
        sample_bytes=by_sample,
        message_bytes=_by(small.message_bytes, size),
        workspace_bytes=_by(small.workspace_bytes, size),
    )


def growth(few_bytes: float, few: int, more_bytes: float, more: int) -> tuple[int, int]:
    """Bytes that do not grow with samples, and bytes a sample, from micro-batches of ``few`` and ``more`` samples."""
    by_sample = _by(more_bytes - few_bytes, more - few)
    return max(0, int(few_bytes) - few * by_sample), by_sample


def _by(nbytes: float, samples: int) -> int:
    """Bytes a sample, rounded up."""
    return int(-(-nbytes // samples))
