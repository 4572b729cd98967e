"""Which micro-batch sizes are measured, in which order, before a run is tuned (Ada-Grouper §5.2), and what follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from evenpipe.planner.grouped import Candidate, GroupedSchedule
from evenpipe.planner.memory import (
    Measured,
    PlanError,
    StageMemory,
    candidates,
    peak_bytes,
    saved_peaks,
    stage_memory,
    stage_times,
    unit_bytes,
)
from evenpipe.tuner.tuner import Tuner, thinned_out

__all__ = ["Conditions", "Explored", "explore"]

_FORMAT: Final = "evenpipe.tuner/1"
#: Memory that differs by less is the same.
_SAME: Final = 0.01


class Conditions(NamedTuple):
    """What the candidates of a tuned run follow from, and what a saved tuner is of use for; the same on all ranks.

    What trains `samples` in a replica's batch, the memory limit of a process, and what stages need. Where micro-batches
    `differ`, as in length, that is what the largest so far has needed.
    """

    schedule: GroupedSchedule
    samples: int
    limit_bytes: int
    memory: tuple[StageMemory, ...]
    differ: bool = False

    def fitting(self, sizes: Sequence[int]) -> tuple[Candidate, ...]:
        """The candidates to tune among, with micro-batches of one of `sizes`. Raises PlanError where none fits."""
        return thinned_out(candidates(self.memory, self.samples, self.limit_bytes, self.schedule, sizes))

    def predicted_saved_bytes(self, used: Sequence[Candidate]) -> tuple[int, ...]:
        """Per stage, the most that one of its processes saves for backwards under any of `used`."""
        peaks = [saved_peaks(self.memory, candidate, self.schedule) for candidate in used]
        return tuple(map(max, zip(*peaks, strict=True)))

    def state_dict(self, tuner: Tuner) -> dict[str, Any]:
        """What a run needs to go on tuning as this one would, as JSON has it; the same on all ranks."""
        return {**self._named(), "memory": [list(stage) for stage in self.memory], "tuner": tuner.state_dict()}

    def resumed(
        self, state: Mapping[str, Any], sizes: Collection[int], interval: int | None, iteration: int
    ) -> Explored | None:
        """Before `iteration`, what a run goes on with that gave `state`; None if that one's conditions were others."""
        memory = tuple(StageMemory(*stage) for stage in state.get("memory", ()))
        alike = _alike(memory, self.memory, static_only=self.differ)
        if not self._named().items() <= state.items() or not alike:
            return None
        tuner = Tuner(self.schedule, (), {}, interval)
        tuner.load_state_dict(state["tuner"], iteration)
        if not {candidate.b for candidate in tuner.candidates} <= set(sizes):
            return None
        if not self.differ:
            return Explored(self, tuner)
        return Explored(self._replace(memory=memory), tuner).grown(self.memory)[0]

    def _named(self) -> dict[str, Any]:
        """Those that have to be the same to the last digit."""
        return {
            "format": _FORMAT,
            "schedule": self.schedule.programs.spec.name,
            "samples": self.samples,
            "bpipe": self.schedule.programs.bpipe,
            "limit_bytes": self.limit_bytes,
        }


class Explored(NamedTuple):
    """What a run is tuned with from now on."""

    conditions: Conditions
    tuner: Tuner

    def grown(self, memory: Sequence[StageMemory]) -> tuple[Explored, str]:
        """From the next decision on, with what still fits where stages have needed `memory` too; and what to say of it.

        A run that trains goes on: where nothing fits any more, the smallest is left.
        """
        conditions, tuner = self
        largest = tuple(StageMemory(*map(max, *both)) for both in zip(conditions.memory, memory, strict=True))
        if largest == conditions.memory:
            return self, ""
        conditions, before = conditions._replace(memory=largest), tuner.candidates
        sizes = sorted({candidate.b for candidate in before})
        try:
            tuner.candidates, said = conditions.fitting(sizes), ""
        except PlanError as error:
            tuner.candidates, said = (Candidate(1, sizes[0], conditions.samples // sizes[0]),), str(error)
        most = max(tuner.candidates).k
        if not said and most < max(before).k:
            said = f"groups of more than {most} no longer fit"
        return Explored(conditions, tuner), said


def explore(
    schedule: GroupedSchedule,
    samples: int,
    sizes: Sequence[int],
    limit_bytes: int,
    interval: int | None,
    resumed: Callable[[Conditions], Explored | None],
    alone: bool,
    differ: bool = False,
) -> Generator[int, Sequence[Measured], Explored]:
    """Asks for one of `sizes` after the other, and is sent what each stage measured of it.

    `samples` are those of a replica's batch. The smallest size comes first: if it does not fit, nothing does. The next
    one shows what grows with samples, if it can be measured within `limit_bytes`: `alone` a micro-batch is on its own,
    otherwise a batch of them trains, in groups of one. Then come the sizes of candidates, which fit in larger groups
    too, unless an earlier run is `resumed`. Raises PlanError where no candidate fits.
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
            pairs = zip(found[smallest], found[size], strict=True)
            memory = tuple(stage_memory(few, smallest, more, size) for few, more in pairs)
    conditions = Conditions(schedule, samples, limit_bytes, memory, differ)
    going_on = resumed(conditions)
    if going_on is not None:
        return going_on
    fitting = conditions.fitting(sizes)
    for size in sorted({candidate.b for candidate in fitting} - found.keys()):
        found[size] = yield size
    times = {size: stage_times(measured) for size, measured in found.items()}
    return Explored(conditions, Tuner(schedule, fitting, times, interval))


def _alike(saved: Sequence[StageMemory], now: Sequence[StageMemory], static_only: bool) -> bool:
    """Whether runs hold the same, but for what libraries of other versions may keep."""
    compared = 1 if static_only else None
    return len(saved) == len(now) and all(
        math.isclose(before, after, rel_tol=_SAME)
        for one, other in zip(saved, now, strict=True)
        for before, after in zip(one[:compared], other[:compared], strict=True)
    )
