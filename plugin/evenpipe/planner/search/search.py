"""Branch and bound over all runs: memory first, then time, and the simulator for those that neither leaves out."""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Final

from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.search.candidates import Candidate, Family, Group, candidates_of, groups, kinds_of
from evenpipe.planner.search.question import Question, nothing_fits
from evenpipe.planner.uncertainty import EQUAL
from evenpipe.schedule import without_cycle_collector

__all__ = ["EQUAL", "Found", "ParetoFront", "Planned", "preference", "search"]


@dataclass(frozen=True)
class Planned:
    """A run that fits, and its estimate."""

    run: Run
    estimate: Estimate

    @cached_property
    def most_bytes(self) -> int:
        """Return the bytes of the fullest stage; what its device has less than the cluster's largest counts as full."""
        fullest = self.estimate.fullest
        return fullest.bytes.total + fullest.lacking

    @property
    def ms_a_sample(self) -> float:
        return 1e3 / self.estimate.samples_per_second

    @cached_property
    def ms_to_loss(self) -> float:
        """Return the milliseconds that rank runs: of a sample, times the iterations that the same loss takes."""
        return self.ms_a_sample * self.run.iterations

    @property
    def computing_ms(self) -> float:
        """Return the milliseconds that a stage computes for a sample, on the mean."""
        each = fmean(stage.forward_ms + stage.backward_ms for stage in self.estimate.stages)
        return each / (self.run.micro_batch * self.run.data)

    @property
    def bubble(self) -> float:
        """Share of an iteration in which a stage does not compute, on the mean: fill, drain, waits, its end."""
        return max(0.0, 1 - self.computing_ms / self.ms_a_sample)


class ParetoFront:
    """Runs of which none is as fast as another and uses as much memory: in order, each slower and with less memory.

    So that it is not a hundred runs long, one has to use less by ``close`` bytes than all that are faster or equally
    fast, and not to take ``slowest`` times as long as the fastest.
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
        """Return whether such a run would be of the front."""
        fastest = self.points[0].ms_to_loss if self.points else math.inf
        return ms < fastest or (ms < self._slowest * fastest and nbytes < self.least(ms * EQUAL) - self._close)

    def enter(self, planned: Planned) -> None:
        """Add it, unless it is not of the front, and leave out what then is not."""
        if not self.takes(planned.ms_to_loss, planned.most_bytes):
            return
        most = planned.most_bytes - self._close
        kept = [one for one in self.points if one.ms_to_loss < planned.ms_to_loss or one.most_bytes < most]
        bisect.insort(kept, planned, key=lambda one: one.ms_to_loss)
        self.points = kept


#: Of the device's memory, by which a slower run of the front has to use less.
_CLOSE: Final = 0.05
#: Of the device's memory, that a plan should leave free: what no estimate counts, and fragments.
_FREE: Final = 0.05
#: Times the fastest's time, from which a run is too slow for the front.
_SLOWEST: Final = 2.0


@dataclass
class Found:
    """``plans``: the fastest, as many as were asked for; before them, of equally fast ones, the one of `preference`.

    front: none uses less memory and is as fast. best: the fastest of each family that was simulated and fits;
    least_bytes: what its smallest run needs at least. considered, allowed: how many runs there are, and a plan may
    have; nearest: bytes of the smallest of the latter. too_large, slower: how many a bound has left out, by memory and
    as slower than what was found; the others were simulated. left_out: groups of runs that were not looked at, as they
    take twice as long as the best.
    """

    plans: list[Planned] = field(default_factory=list)
    front: list[Planned] = field(default_factory=list)
    best: dict[Family, Planned] = field(default_factory=dict)
    least_bytes: dict[Family, int] = field(default_factory=dict)
    considered: int = 0
    allowed: int = 0
    nearest: float = math.inf
    too_large: int = 0
    slower: int = 0
    simulated: int = 0
    left_out: int = 0


@without_cycle_collector()
def search(
    question: Question, top: int = 1, told: Callable[[int, int], None] | None = None, with_front: bool = False
) -> Found:
    """Return the fastest runs, the best of each family and, ``with_front``, the front of memory against speed.

    The front takes as many simulations again, and changes neither the fastest runs nor the families'.
    ``told`` is called with how many runs have been simulated, and how many runs and groups of them are not weighed yet.

    Runs are compared by the time to the same loss: a run with late gradients needs more iterations (`Run.iterations`).

    No run that a bound leaves out could be among the ``top`` or, but for `EQUAL` times, on the front: by memory, as it
    would not fit; by time, as what is simulated already is at least as fast as it could be, with as little memory.
    Of a family that none of these is of, the run that fits and has the least bound is taken for its best. Of schedules
    that a plan may not have it is weighed without BPipe.
    BPipe is planned where a run does not fit without it: evictions only add to what stages wait for (BPipe §4.2), and
    the time without them, with ranks in the same places, is a bound too.
    Raises EstimateError, one line, where nothing fits.
    """
    question.check()
    found = Found()
    queue: list[Candidate] = []
    waiting = []
    for group in groups(question):
        if group.ms:
            waiting.append(group)
        else:
            _queue(question, group, found, queue)
    heapq.heapify(waiting)
    estimate = Estimator(question.model, question.cluster, question.of)
    have = question.cluster.device.memory_gib * 2**30
    front = ParetoFront(_CLOSE * have, _SLOWEST) if with_front else None
    plain: dict[Run, float] = {}
    fitting: set[Run] = set()  # wherever their ranks are
    while queue or waiting:
        if told is not None:
            told(found.simulated, len(queue) + len(waiting))
        if waiting and (not queue or waiting[0].ms <= queue[0].ms):
            group = heapq.heappop(waiting)
            if len(found.plans) >= top and group.ms >= _SLOWEST * found.plans[0].ms_to_loss:
                found.left_out += 1
            else:
                _queue(_of_use(question, group, found, front, top), group, found, queue)
            continue
        candidate = heapq.heappop(queue)
        run = candidate.run
        ms = plain.get(_without_bpipe(question, run), 0.0) if run.bpipe and question.nodes.alike else 0.0
        fits = run.bpipe and replace(run, bpipe=False) in fitting
        if ms > candidate.ms:
            heapq.heappush(queue, candidate._replace(ms=ms))
            continue
        counts = _may_count(candidate, found, 0 if fits else top, have)
        if not counts and not _of_front(candidate, front):
            found.slower += 1
            continue
        found.simulated += 1
        try:
            planned = Planned(run, estimate(run))
        except EstimateError:
            continue
        if not run.bpipe:
            plain[run] = planned.ms_to_loss
            if planned.estimate.fits:
                fitting.add(replace(run, placement="replicas"))
        if candidate.allowed:
            found.nearest = min(found.nearest, planned.most_bytes)
        if planned.estimate.fits and counts:
            _enter(planned, candidate, found, 0 if fits else top)
        if planned.estimate.fits and candidate.allowed and front is not None:
            front.enter(planned)
    found.front = [] if front is None else front.points
    if not found.plans:
        raise EstimateError(nothing_fits(question, found.allowed, found.nearest))
    first = min(_equal(found.plans), key=lambda one: (preference(one.run, one.most_bytes, have), one.ms_to_loss))
    found.plans = [first, *(one for one in found.plans if one is not first)][:top]
    return found


def preference(run: Run, nbytes: int, have: float) -> tuple[bool, int]:
    """Return what comes first of runs that are equally fast: memory that is free, and a simple schedule.

    A schedule is the simpler the less it needs of an engine; BPipe is one thing more.
    """
    return nbytes > (1 - _FREE) * have, len(run.spec.needs) + run.bpipe


def _equal(plans: list[Planned]) -> list[Planned]:
    return [one for one in plans if one.ms_to_loss <= EQUAL * plans[0].ms_to_loss]


def _queue(question: Question, group: Group, found: Found, queue: list[Candidate]) -> None:
    """Put the group's runs that may fit into the queue; the others are counted."""
    have = question.cluster.device.memory_gib * 2**30
    for candidate in candidates_of(question, group):
        found.considered += 1
        found.allowed += candidate.allowed
        for family in candidate.families:
            found.least_bytes[family] = min(candidate.nbytes, found.least_bytes.get(family, candidate.nbytes))
        if candidate.nbytes <= have:
            heapq.heappush(queue, candidate)
            continue
        found.too_large += 1
        if candidate.allowed:
            found.nearest = min(found.nearest, candidate.nbytes)


def _of_use(question: Question, group: Group, found: Found, front: ParetoFront | None, top: int) -> Question:
    """Return what to ask of a group: of one that no plan and no front can have runs of, only schedules without a run.

    No plan and no front will have any later either, as both only get better.
    """
    if (
        len(found.plans) < top
        or group.ms < max(found.plans[top - 1].ms_to_loss, EQUAL * found.plans[0].ms_to_loss)
        or (front is not None and front.takes(group.ms, group.nbytes))
        or any(family not in found.best for family in kinds_of(question, group.run))
    ):
        return question
    known = {family.value for family in found.best if family.kind == "schedule"}
    if group.run.stages == 1:
        return question if "no pipeline" not in known else replace(question, schedules=())
    return replace(question, schedules=tuple(name for name in question.schedules if name not in known))


def _may_count(candidate: Candidate, found: Found, top: int, have: float) -> bool:
    """Return whether it may be the best of a family, or planned."""
    if any(family not in found.best for family in candidate.families):
        return True
    return candidate.allowed and top > 0 and _may_be_planned(candidate, found, top, have)


def _of_front(candidate: Candidate, front: ParetoFront | None) -> bool:
    return front is not None and candidate.allowed and front.takes(candidate.ms, candidate.nbytes)


def _may_be_planned(candidate: Candidate, found: Found, top: int, have: float) -> bool:
    """From the first candidate on that cannot be the fastest, the fastest is known, as its bound is the least."""
    plans = found.plans
    if len(plans) < top or candidate.ms < plans[top - 1].ms_to_loss:
        return True
    if candidate.ms > EQUAL * plans[0].ms_to_loss:
        return False
    best = min((preference(one.run, one.most_bytes, have), one.ms_to_loss) for one in _equal(plans))
    return (preference(candidate.run, candidate.nbytes, have), candidate.ms) < best


def _enter(planned: Planned, candidate: Candidate, found: Found, top: int) -> None:
    for family in candidate.families:
        best = found.best.get(family)
        if best is None or planned.ms_to_loss < best.ms_to_loss:
            found.best[family] = planned
    if candidate.allowed and top:
        bisect.insort(found.plans, planned, key=lambda one: one.ms_to_loss)
        del found.plans[max(top, len(_equal(found.plans))) :]


def _without_bpipe(question: Question, run: Run) -> Run:
    """Return the same run, its ranks in the same places: pairs of stages are next to each other before replicas are."""
    cluster = question.cluster
    in_pairs = 2 * run.together <= cluster.gpus_per_node and run.data > 1 and cluster.nodes > 1
    return replace(run, bpipe=False, placement="pipeline" if in_pairs else "replicas")
