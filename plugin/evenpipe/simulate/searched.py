"""A schedule for given costs, searched, verified, and judged by the simulator, which knows when receives are posted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from evenpipe.order_search.costs import RunCosts, check_caps
from evenpipe.order_search.evicting import lent, sharing, with_evictions, with_swaps_to_hosts
from evenpipe.order_search.problem import Problem
from evenpipe.order_search.recomputing import recomputations
from evenpipe.order_search.search import USUAL, Effort, search
from evenpipe.schedule import Program, Queues, Schedule, ScheduleError, verify
from evenpipe.simulate.costs import Costs
from evenpipe.simulate.simulator import simulate

__all__ = ["Searched", "searched"]

_Moving: TypeAlias = tuple[str, Sequence[Problem], Callable[[Schedule], Schedule]]


class Searched(NamedTuple):
    """The program of the best order that was found, and the milliseconds of a batch, by simulation.

    published_ms: under the best of those that are published, with nothing computed again; infinite where none fits.
    """

    program: Program
    batch_ms: float
    published_ms: float


def searched(
    costs: RunCosts,
    stages: int,
    micro_batches: int,
    effort: Effort = USUAL,
    *,
    split: bool = True,
    queues: Queues = "many",
    told: Callable[[str], None] = lambda line: None,
) -> Searched:
    """Return the best order that is found, by simulation no slower than those that are published.

    split: backwards come in halves; then parts whose costs say what they leave may be computed again. Where the costs
    say how fast stages evict to their partners, and the placement is straight, as much again is searched for orders
    that do; and as much for orders that swap, where they say how fast stages copy to their hosts. Raises
    :class:`ScheduleError` where the costs do not fit so many stages, or a cap holds no micro-batch.
    """

    def proven(schedule: Schedule) -> tuple[Program, float]:
        check_caps(schedule, costs)
        program = verify(schedule, any(schedule.evictions), queues)
        return program, simulate(program, Costs.of_parts(costs, schedule)).makespan_ms

    problem = Problem.of(costs, stages, micro_batches, split)
    found, choices = list[Searched](), recomputations(problem)
    each = effort._replace(seconds=effort.seconds / len(choices))
    for choice in choices:
        if choice:
            told(f"parts {', '.join(map(str, sorted(choice)))} computed again")
        of_choice = search(replace(problem, recomputed=choice), each, told=told)
        published = [proven(schedule) for schedule in of_choice.published]
        best_ms = min((ms for _, ms in published), default=math.inf)
        program, ms = next(one for one in (*map(proven, of_choice.best), *published) if one[1] <= best_ms)
        found.append(Searched(program, ms, math.inf if choice else best_ms))
    if costs.peer_bytes_per_ms is not None and costs.placement != "straight":
        told("nothing is evicted to partners: only straight placements are searched for that")
    for kind, given, moved in _moving(costs, problem, queues):
        for larger in given:
            told(f"caps with what {kind} hold")
            of_caps = search(larger, effort._replace(seconds=effort.seconds / len(given)), told=told)
            orders, before = (*of_caps.best, *of_caps.published), len(found)
            for schedule in orders:
                with suppress(ScheduleError):  # there is no room for it
                    found.append(Searched(*proven(moved(schedule)), math.inf))
            told(f"{len(found) - before} of {len(orders)} orders keep to each stage's cap by what {kind} hold")
    best = min(found, key=lambda one: one.batch_ms)
    return best._replace(published_ms=min(one.published_ms for one in found))


def _moving(costs: RunCosts, problem: Problem, queues: Queues) -> Iterator[_Moving]:
    """Yield, for each kind of memory elsewhere, its name, the problems with it, and what gives an order its moves."""
    if costs.peer_bytes_per_ms is not None:
        yield "partners", sharing(problem), lambda schedule: with_evictions(schedule, problem, queues)
    if costs.host_bytes_per_ms is not None:
        yield "hosts", lent(problem), lambda schedule: with_swaps_to_hosts(schedule, problem)
