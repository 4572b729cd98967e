"""Memory in groups of k micro-batches: measured stages, their peaks, and the sizes that fit (Ada-Grouper §4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, Context, Decimal
from typing import NamedTuple

from evenpipe.planner.divisors import divisors
from evenpipe.tuner.grouped import Candidate, GroupedSchedule, StageTimes

__all__ = [
    "Measured",
    "PlanError",
    "StageMemory",
    "candidates",
    "growth",
    "peak_bytes",
    "saved_peaks",
    "stage_memory",
    "stage_times",
    "unit_bytes",
]


class StageMemory(NamedTuple):
    """The memory of one process of one stage, in bytes.

    ``static_bytes``: parameters, gradients, optimizer state and communicators. ``shared_bytes``: saved once, whatever
    the number of micro-batches (a causal mask). A micro-batch saves ``fixed_bytes``, and ``sample_bytes`` for each of
    its samples. ``message_bytes``: what travels between neighbours, one way, for a sample. ``workspace_bytes``: kept
    for a sample of the micro-batch that is being computed.
    """

    static_bytes: int
    shared_bytes: int
    fixed_bytes: int
    sample_bytes: int
    message_bytes: int
    workspace_bytes: int = 0


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
    """Return what the stages compute for micro-batches of the size that was measured."""
    return StageTimes(tuple(one.forward_ms for one in measured), tuple(one.backward_ms for one in measured))


def stage_memory(small: Measured, size: int, large: Measured | None = None, larger: int = 0) -> StageMemory:
    """Return what a stage needs for micro-batches of any size.

    ``small`` was measured with micro-batches of ``size`` samples, ``large``, if given, with ``larger`` ones. The
    shared bytes are those of ``small``. Without ``large``, all that a micro-batch holds is taken to grow with its
    samples.
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
    """Return bytes a sample, rounded up."""
    return int(-(-nbytes // samples))


def unit_bytes(stage: StageMemory, micro_batch_size: int) -> int:
    """Return what one micro-batch of so many samples saves for its backward."""
    return stage.fixed_bytes + micro_batch_size * stage.sample_bytes


def peak_bytes(memory: Sequence[StageMemory], candidate: Candidate, schedule: GroupedSchedule) -> tuple[int, ...]:
    """Per stage, the most that one of its processes holds in a batch under ``candidate``.

    Saved activations at their peak, with what stays, and the messages that are under way beside them. What an operation
    takes only while it runs is not among it.
    """
    peaks = []
    of_stages = zip(memory, saved_peaks(memory, candidate, schedule), schedule.messages_at_once(candidate), strict=True)
    for stage, saved, messages in of_stages:
        beside = candidate.b * (stage.workspace_bytes + messages * stage.message_bytes)
        peaks.append(stage.static_bytes + saved + beside)
    return tuple(peaks)


def saved_peaks(memory: Sequence[StageMemory], candidate: Candidate, schedule: GroupedSchedule) -> tuple[int, ...]:
    """Per stage, the most that one of its processes has saved for backwards in a batch under ``candidate``."""
    saved = schedule.saved_bytes([unit_bytes(stage, candidate.b) for stage in memory], candidate)
    return tuple(stage.shared_bytes + held for stage, held in zip(memory, saved, strict=True))


class PlanError(ValueError):
    """There is no candidate; the message is one line that says what would do."""


def candidates(
    memory: Sequence[StageMemory],
    samples: int,
    limit_bytes: int,
    schedule: GroupedSchedule,
    sizes: Sequence[int] | None = None,
) -> tuple[Candidate, ...]:
    """For k = 1, 2, ..: the largest b whose peak is within ``limit_bytes`` on every stage, up to the last k that fits.

    b divides ``samples``, those of a replica's batch, and is one of ``sizes`` if they are given. It never grows with k,
    and a group is never larger than the batch: k ≤ m. Smaller b for the same k lie under the curve and are pruned.

    Raises PlanError where nothing fits, with the least memory that would do, and for a size that does not divide.
    """
    if sizes is None:
        sizes = divisors(samples)
    for size in sizes:
        if size < 1 or samples % size:
            raise PlanError(f"micro-batches of {size} samples: do not divide the {samples} of a batch: use a divisor")
    left = sorted(set(sizes), reverse=True)
    found: list[Candidate] = []
    while left:
        tried = Candidate(len(found) + 1, left[0], samples // left[0])
        if tried.k <= tried.m and max(peak_bytes(memory, tried, schedule)) <= limit_bytes:
            found.append(tried)
        else:
            # What does not fit now does not fit larger groups either.
            del left[0]
    if not found:
        raise PlanError(_least(memory, [Candidate(1, size, samples // size) for size in sizes], schedule))
    return tuple(found)


def _least(memory: Sequence[StageMemory], tried: Sequence[Candidate], schedule: GroupedSchedule) -> str:
    """Return what to say where none of ``tried`` fits."""
    peaks = {candidate: peak_bytes(memory, candidate, schedule) for candidate in tried}
    best = min(peaks, key=lambda candidate: max(peaks[candidate]))
    needed = max(peaks[best])
    stage = peaks[best].index(needed)
    return (
        f"no micro-batch size fits: stage {stage} needs {_rounded(needed)} GiB for micro-batches of {best.b}, "
        f"not grouped: give at least {_rounded(needed)} GiB, or cut the model into more stages"
    )


def _rounded(nbytes: int) -> str:
    """GiB with four digits, rounded up, so that what is given according to it is enough."""
    return f"{Context(prec=4, rounding=ROUND_CEILING).divide(Decimal(nbytes), Decimal(2**30)):f}"
