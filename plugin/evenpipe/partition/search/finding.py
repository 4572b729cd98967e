"""The best partition of a model for a schedule and a memory limit, and the largest micro-batch that fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, inf
from typing import Final

from evenpipe.partition.dawnpiper.bipar import bipar
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import PartitionError, Problem
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.batch_clock import BatchClock, StageLinks
from evenpipe.partition.search.choosing import Reached, Way, fastest_batch, longest_ms
from evenpipe.partition.search.exact import best_partition
from evenpipe.partition.search.plan import Plan, plan_of
from evenpipe.schedule import without_cycle_collector

__all__ = ["can_fit", "find_plan", "largest_batch", "least_limit"]

_GIB: Final = 1 << 30
#: How many ranges the exact search weighs with memory optimisation: a part of a second; all, in models of so few cuts.
_MOST_WEIGHED, _FEW_CUTS = 50, 96
#: BiPar weighs so many of these, and cuts so many parts, in a find_plan.
_BINARY_WEIGHED, _BINARY_PARTS = 15, 300
#: It is not followed where it can only come out slower than the optimum by more than this.
_CEILING = 1.1
#: How close to the least memory limit the one named in an error is; to know it closer takes many searches.
_CLOSE = 1.01
#: How many percent larger micro-batches are tried beyond the largest so far.
_BEYOND = (2, 5, 10)


def find_plan(
    profile: Profile,
    workload: Workload,
    stages: int,
    limit_bytes: int,
    optimize: Optimize = "none",
    host_gbps: float = 0.0,
    links: StageLinks | None = None,
) -> Plan:
    """Return the better of the exact search and of BiPar. `host_gbps`: of a stage's link to its host, each way.

    `links`: between stages; None: messages are free. With links the plan is the one whose batch is fastest by the
    simulator: of these two, of others that send less, and of layer cuts, with boundaries moved as long as that helps.

    The exact search weighs as many ranges for what they recompute and swap as take a part of a second, and all in a
    model of few cuts. Where most saved bytes have to go, a proof of the last hundredth takes thousands; without it
    `optimum_ms` is further below.

    Raises PartitionError, one line, for more stages than there are cuts, and for a limit that nothing fits into, with a
    limit that is enough; ScheduleError for a schedule that cannot be.
    """
    began = time.perf_counter()
    with without_cycle_collector():  # which walks all of torch and the profile, for a second
        problem = Problem.of(profile, workload, stages, limit_bytes, optimize, host_gbps)
        plan = _plan(problem, workload, links)
    return plan.model_copy(update={"search_ms": (time.perf_counter() - began) * 1e3})


def _plan(problem: Problem, workload: Workload, links: StageLinks | None) -> Plan:
    most_weighed = _MOST_WEIGHED if problem.costs.last > _FEW_CUTS else inf
    exact = best_partition(problem, most_weighed)
    floor_ms = exact.ms if exact is not None else 0.0
    ceiling_ms = floor_ms * _CEILING or inf
    binary = bipar(problem, floor_ms, ceiling_ms, min(_BINARY_WEIGHED, most_weighed), _BINARY_PARTS)
    peaks = problem.peaks(binary.part.cuts) if binary.part is not None else None
    part = binary.part if peaks is not None and max(peaks) <= problem.limit_bytes else None
    ways = [Way("exact", exact.cuts, exact.fits)] if exact is not None else []
    ways += [Way("bipar", part.cuts, problem.fits_of(part.cuts))] if part is not None else []
    if links is None or problem.copies.positions == 1:
        chosen, reached = min(ways, key=lambda way: longest_ms(problem, way), default=None), Reached()
    else:
        chosen, reached = fastest_batch(problem, BatchClock(problem, workload, links), ways)
    if chosen is None:
        raise PartitionError(_too_little(problem))
    plan = plan_of(problem, chosen.cuts, chosen.fits, workload)
    least_ms = problem.least_ms if exact is None else exact.optimum_ms
    return plan.model_copy(
        update={
            "nodes_tried": binary.nodes_tried,
            "optimum_ms": min(least_ms, plan.max_stage_ms),
            "binary_ms": None if part is None else part.ms,
            "binary_whole": binary.whole,
            "algorithm": chosen.algorithm,
            **reached._asdict(),
        }
    )


def can_fit(problem: Problem) -> bool:
    """Return whether the exact search finds a plan."""
    return best_partition(problem, 0) is not None


def _too_little(problem: Problem) -> str:
    least, limit = least_limit(problem), problem.limit_bytes / _GIB
    remedy = "" if problem.optimize != "none" else ", or optimize by recompute or swap+recompute"
    return f"memory_gib={limit:.4g}: no partition fits: give at least {ceil(least / _GIB * 1e4) / 1e4:g}{remedy}"


def least_limit(problem: Problem) -> int:
    """Return bytes a stage that are enough for a partition: within 1 % of the least that is known to be enough."""
    high = max(1, problem.limit_bytes)
    while not can_fit(problem.within(high)):
        high *= 2
    low = high // 2
    while high > max(low + 1, low * _CLOSE):
        middle = (low + high) // 2
        low, high = (low, middle) if can_fit(problem.within(middle)) else (middle, high)
    return high


def largest_batch(
    profile_at: Callable[[int], Profile], fits: Callable[[Profile], bool], *, step: int = 1, most: int = 1 << 16
) -> int:
    """Return the largest multiple of `step`, up to `most`, whose profile `fits`; 0 if there is none.

    `profile_at` gives the profile of micro-batches of so many samples; `fits` cuts it in its own way (`can_fit` in
    ours). The size doubles while it fits; then it is bisected. Without memory optimisation, a profile that does not fit
    does not with more samples. With it, a few sizes may find no picks although larger ones do: so some larger ones are
    tried at the end, and if any fits, the search goes on from there.
    """

    def holds(steps: int) -> bool:
        return steps * step <= most and fits(profile_at(steps * step))

    low, high = 0, 1
    while True:
        while holds(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        beyond = (low + 1 + low * more // 100 for more in _BEYOND)
        larger = next((steps for steps in beyond if steps > low + 1 and holds(steps)), None)
        if larger is None:
            return low * step
        low, high = larger, 2 * larger
