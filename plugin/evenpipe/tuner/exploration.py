"""Which micro-batch sizes are measured, in which order, before a run is tuned (Ada-Grouper §5.2)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from evenpipe.planner import (
    Candidate,
    GroupedSchedule,
    Measured,
    StageMemory,
    peak_bytes,
    stage_memory,
    stage_times,
    unit_bytes,
)
from evenpipe.tuner.conditions import Conditions
from evenpipe.tuner.tuner import Tuner

__all__ = ["Explored", "explore"]


class Explored(NamedTuple):
    """What a run is tuned with from now on."""

    conditions: Conditions
    tuner: Tuner


def explore(
    schedule: GroupedSchedule,
    samples: int,
    sizes: Sequence[int],
    limit_bytes: int,
    interval: int | None,
    resumed: Callable[[Conditions], Tuner | None],
    alone: bool,
) -> Generator[int, Sequence[Measured], Explored]:
    """Asks for one of `sizes` after the other, and is sent what each stage measured of it.

    `samples` are those of a replica's batch. The smallest size comes first: if it does not fit, nothing does. The next
    one shows what grows with samples, if it can be measured within `limit_bytes`: `alone` a micro-batch is on its own,
    otherwise a batch of them trains, in groups of one. Then come the sizes of candidates, which fit in larger groups
    too, unless the tuner of an earlier run is `resumed`. Raises PlanError where no candidate fits.
    """
    smallest, *larger = sorted(sizes)
    found = {smallest: (yield smallest)}
    memory = tuple(stage_memory(small, smallest) for small in found[smallest])
    if larger:
        size = larger[0]
        if alone:
            needed = max(stage.static_bytes + unit_bytes(stage, size) for stage in memory)
        else:
            needed = max(peak_bytes(memory, Candidate(1, size, samples // size), schedule))
        if needed <= limit_bytes:
            found[size] = yield size
            memory = _grown(found[smallest], smallest, found[size], size)
    conditions = Conditions(schedule, samples, limit_bytes, memory)
    tuner = resumed(conditions)
    if tuner is None:
        candidates = conditions.fitting(sizes)
        for size in sorted({candidate.b for candidate in candidates} - found.keys()):
            found[size] = yield size
        times = {size: stage_times(measured) for size, measured in found.items()}
        tuner = Tuner(schedule, candidates, times, interval)
    return Explored(conditions, tuner)


def _grown(small: Sequence[Measured], size: int, large: Sequence[Measured], larger: int) -> tuple[StageMemory, ...]:
    return tuple(stage_memory(few, size, more, larger) for few, more in zip(small, large, strict=True))
