"""The memory-limit curve: for each group size, the largest micro-batch size that fits (Ada-Grouper §4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, Context, Decimal

from evenpipe.planner.grouped import Candidate, GroupedSchedule
from evenpipe.planner.memory import StageMemory, peak_bytes

__all__ = ["PlanError", "candidates", "divisors"]


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


def divisors(samples: int) -> list[int]:
    """The sizes that micro-batches of so many samples together may have."""
    return [size for size in range(1, samples + 1) if samples % size == 0]


def _least(memory: Sequence[StageMemory], tried: Sequence[Candidate], schedule: GroupedSchedule) -> str:
    """What to say where none of ``tried`` fits."""
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
