"""Which micro-batch sizes are measured, in which order, before a run is tuned."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from evenpipe.deepspeed.adaptive.measured import Measured
from evenpipe.planner import Candidate, StageMemory, peak_bytes
from evenpipe.tuner.conditions import Conditions
from evenpipe.tuner.tuner import Tuner

__all__ = ["Explored", "explore"]


class Explored(NamedTuple):
    """What a run is tuned with from now on."""

    conditions: Conditions
    tuner: Tuner


def explore(
    samples: int,
    sizes: Sequence[int],
    bpipe: bool,
    limit_bytes: int,
    interval: int | None,
    resumed: Callable[[Conditions], Tuner | None],
) -> Generator[int, Measured, Explored]:
    """Asks for one of `sizes` after the other, to be trained with in groups of one, and is sent what was measured.

    `samples` are those of a replica's batch. The smallest size comes first: if it does not fit, nothing does. The next
    one shows what grows with samples. Then come those of candidates, which fit in larger groups too, unless the tuner
    of an earlier run is `resumed`. Raises PlanError where no candidate fits `limit_bytes`.
    """
    smallest, *larger = sorted(sizes)
    found = {smallest: (yield smallest)}
    memory = _in_proportion(found[smallest], smallest)
    if larger and max(peak_bytes(memory, Candidate(1, larger[0], samples // larger[0]), bpipe)) <= limit_bytes:
        found[larger[0]] = yield larger[0]
        memory = _growing(found[smallest], smallest, found[larger[0]], larger[0])
    conditions = Conditions(samples, bpipe, limit_bytes, memory)
    tuner = resumed(conditions)
    if tuner is None:
        candidates = conditions.fitting(sizes)
        for size in sorted({candidate.b for candidate in candidates} - found.keys()):
            found[size] = yield size
        times = {size: measured.times for size, measured in found.items()}
        tuner = Tuner(candidates, len(memory), bpipe, times, interval)
    return Explored(conditions, tuner)


def _in_proportion(found: Measured, size: int) -> tuple[StageMemory, ...]:
    """As if all that a micro-batch holds grew with its samples."""
    return tuple(
        StageMemory(int(static), int(shared), 0, _by(each, size), _by(message, size))
        for each, shared, message, static in zip(*found[2:], strict=True)
    )


def _growing(small: Measured, size: int, large: Measured, larger: int) -> tuple[StageMemory, ...]:
    """What does not grow with samples, and what does."""
    stages = []
    for few, more, proportional in zip(small.each_bytes, large.each_bytes, _in_proportion(small, size), strict=True):
        by_sample = _by(more - few, larger - size)
        fixed = max(0, int(few) - size * by_sample)
        stages.append(proportional._replace(fixed_bytes=fixed, sample_bytes=by_sample))
    return tuple(stages)


def _by(nbytes: float, samples: int) -> int:
    """Bytes a sample, rounded up."""
    return int(-(-nbytes // samples))
