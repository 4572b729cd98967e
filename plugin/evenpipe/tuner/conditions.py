"""What the candidates of a tuned run follow from, and what a saved tuner is of use for."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from evenpipe.planner import Candidate, GroupedSchedule, StageMemory, candidates, saved_peaks
from evenpipe.tuner.tuner import Tuner, thinned_out

__all__ = ["Conditions"]

_FORMAT: Final = "evenpipe.tuner/1"
#: The schedule of states that do not say which.
_FIRST: Final = "kfkb"
#: Memory that differs by less is the same.
_SAME: Final = 0.01


class Conditions(NamedTuple):
    """The same on all ranks: what trains `samples` in a replica's batch, the limit of a process, what stages need."""

    schedule: GroupedSchedule
    samples: int
    limit_bytes: int
    memory: tuple[StageMemory, ...]

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
    ) -> Tuner | None:
        """Before `iteration`, the tuner of the run that gave `state`; None if that one's conditions were others."""
        memory = [StageMemory(*stage) for stage in state.get("memory", ())]
        if not self._named().items() <= ({"schedule": _FIRST} | dict(state)).items() or not _alike(memory, self.memory):
            return None
        tuner = Tuner(self.schedule, (), {}, interval)
        tuner.load_state_dict(state["tuner"], iteration)
        return tuner if {candidate.b for candidate in tuner.candidates} <= set(sizes) else None

    def _named(self) -> dict[str, Any]:
        """Those that have to be the same to the last digit."""
        return {
            "format": _FORMAT,
            "schedule": self.schedule.programs.spec.name,
            "samples": self.samples,
            "bpipe": self.schedule.programs.bpipe,
            "limit_bytes": self.limit_bytes,
        }


def _alike(saved: Sequence[StageMemory], now: Sequence[StageMemory]) -> bool:
    """Whether runs hold the same, but for what libraries of other versions may keep."""
    return len(saved) == len(now) and all(
        math.isclose(before, after, rel_tol=_SAME)
        for one, other in zip(saved, now, strict=True)
        for before, after in zip(one, other, strict=True)
    )
