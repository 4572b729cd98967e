"""A schedule whose micro-batches run in groups of a size that is to be chosen, as planner and tuner know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evenpipe.schedule import Program, Programs, Size, build
from evenpipe.simulate import Costs, simulate

__all__ = ["Candidate", "GroupedSchedule"]


class Candidate(NamedTuple):
    """Groups of ``k`` micro-batches of ``b`` samples, of which a replica's batch has ``m``."""

    k: int
    b: int
    m: int

    @property
    def name(self) -> str:
        """Such as k2b4."""
        return f"k{self.k}b{self.b}"


class GroupedSchedule(NamedTuple):
    """What trains on p ``stages``, but for the sizes that are to be chosen: a schedule with groups, BPipe or not."""

    programs: Programs
    stages: int

    def program(self, candidate: Candidate) -> Program:
        """What is carried out under ``candidate``: built when it is first asked for, and kept."""
        return self.programs(self._size(candidate))

    def saved_bytes(self, units: Sequence[int], candidate: Candidate) -> tuple[int, ...]:
        """Per stage, the peak of own plus accepted saved activations; ``units[s]``: those of a micro-batch of stage s.

        Times do not matter, since transfers are waited for by the schedule's bound. Many candidates are weighed of
        which few are carried out, so nothing is kept.
        """
        spec, size = self.programs.spec, self._size(candidate)
        if spec.live is not None and not self.programs.bpipe:
            return tuple(live * unit for live, unit in zip(spec.live(size), units, strict=True))
        if spec.settled is not None:
            size = size._replace(micro_batches=spec.settled(size))
        costs = Costs((1.0,) * self.stages, (2.0,) * self.stages)
        simulation = simulate(build(spec, size, self.programs.bpipe), costs, [(unit,) for unit in units])
        return tuple(stage.peak_bytes for stage in simulation.stages)

    def _size(self, candidate: Candidate) -> Size:
        return Size(self.stages, candidate.m, group_size=candidate.k)
