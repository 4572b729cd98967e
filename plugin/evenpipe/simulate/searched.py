"""A schedule for given costs, searched, verified, and judged by the simulator, which knows when receives are posted."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from evenpipe.schedule import Program, Queues, Schedule, ScheduleError, verify
from evenpipe.schedule.search.costs import RunCosts, check_caps
from evenpipe.schedule.search.evicting import sharing, with_evictions
from evenpipe.schedule.search.problem import Problem
from evenpipe.schedule.search.recomputing import recomputations
from evenpipe.schedule.search.search import USUAL, Effort, search
from evenpipe.simulate.costs import Costs
from evenpipe.simulate.simulator import simulate

__all__ = ["Searched", "searched"]


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
    that do. Raises :class:`ScheduleError` where the costs do not fit so many stages, or a cap holds no micro-batch.
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
    shared = sharing(problem) if costs.peer_bytes_per_ms is not None else []
    if costs.peer_bytes_per_ms is not None and costs.placement != "straight":
        told("nothing is evicted: only straight placements are searched for evictions")
    for of_pairs in shared:
        told("caps shared by partner stages")
        each = effort._replace(seconds=effort.seconds / len(shared))
        of_caps = search(of_pairs, each, told=told)
        orders, before = (*of_caps.best, *of_caps.published), len(found)
        for schedule in orders:
            with suppress(ScheduleError):  # there is no room for its evictions
                found.append(Searched(*proven(with_evictions(schedule, problem, queues)), math.inf))
        told(f"{len(found) - before} of {len(orders)} orders keep to each stage's cap by evictions")
    best = min(found, key=lambda one: one.batch_ms)
    return best._replace(published_ms=min(one.published_ms for one in found))
