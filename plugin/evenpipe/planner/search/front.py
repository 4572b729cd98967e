"""Runs that fit, and the Pareto front of memory against speed among them."""

from __future__ import annotations

import bisect
import math
from statistics import fmean
from typing import NamedTuple

from evenpipe.planner.estimate import Estimate
from evenpipe.planner.run import Run

__all__ = ["ParetoFront", "Planned"]


class Planned(NamedTuple):
    """A run that fits, and its estimate."""

    run: Run
    estimate: Estimate

    @property
    def most_bytes(self) -> int:
        """Of the fullest stage."""
        return max(stage.bytes.total for stage in self.estimate.stages)

    @property
    def ms_a_sample(self) -> float:
        return 1e3 / self.estimate.samples_per_second

    @property
    def ms_to_loss(self) -> float:
        """Return the milliseconds that rank runs: of a sample, times the iterations that the same loss takes."""
        return self.ms_a_sample * self.run.iterations

    @property
    def computing_ms(self) -> float:
        """Of a sample, what a stage computes, on the mean."""
        each = fmean(stage.forward_ms + stage.backward_ms for stage in self.estimate.stages)
        return each / (self.run.micro_batch * self.run.data)

    @property
    def bubble(self) -> float:
        """Share of an iteration in which a stage does not compute, on the mean: fill, drain, waits, its end."""
        return max(0.0, 1 - self.computing_ms / self.ms_a_sample)


class ParetoFront:
    """Runs of which none is as fast as another and uses as much memory: in order, each slower and with less memory.

    So that it is not a hundred runs long, a slower one has to use less by ``close`` bytes, and not to take ``slowest``
    times as long as the fastest.
    """

    def __init__(self, close: float, slowest: float) -> None:
        self.points: list[Planned] = []
        self._close = close
        self._slowest = slowest

    def least(self, ms: float) -> float:
        """Return the least memory of those whose `Planned.ms_to_loss` is at most ``ms``."""
        at = bisect.bisect_right(self.points, ms, key=lambda one: one.ms_to_loss)
        return self.points[at - 1].most_bytes if at else math.inf

    def takes(self, ms: float, nbytes: int) -> bool:
        """Whether such a run would be of the front."""
        if self.points and ms >= self._slowest * self.points[0].ms_to_loss:
            return False
        return nbytes < self.least(ms) - self._close

    def enter(self, planned: Planned) -> None:
        """Add it, unless it is not of the front, and leave out what then is not."""
        if not self.takes(planned.ms_to_loss, planned.most_bytes):
            return
        most = planned.most_bytes - self._close
        kept = [one for one in self.points if one.ms_to_loss < planned.ms_to_loss or one.most_bytes < most]
        bisect.insort(kept, planned, key=lambda one: one.ms_to_loss)
        self.points = kept
