"""A schedule for given costs, searched, verified, and judged by the simulator, which knows when receives are posted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from evenpipe.schedule import Program, Queues, Schedule, verify
from evenpipe.schedule.search.costs import RunCosts, check_caps
from evenpipe.schedule.search.problem import Problem
from evenpipe.schedule.search.search import USUAL, Effort, search
from evenpipe.simulate.costs import Costs
from evenpipe.simulate.simulator import simulate

__all__ = ["Searched", "searched"]


class Searched(NamedTuple):
    """The program of the best order that was found, and the milliseconds of a batch, by simulation.

    published_ms: under the best of those that are published, of which at least one fits; else infinite.
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

    split: backwards come in halves. Raises :class:`ScheduleError` where the costs do not fit so many stages, or a cap
    holds no micro-batch.
    """
    of_parts = Costs.of_parts(costs, stages)

    def proven(schedule: Schedule) -> tuple[Program, float]:
        check_caps(schedule, costs)
        program = verify(schedule, queues=queues)
        return program, simulate(program, of_parts).makespan_ms

    found = search(Problem.of(costs, stages, micro_batches, split), effort, told=told)
    published = [proven(schedule) for schedule in found.published]
    best_ms = min((ms for _, ms in published), default=math.inf)
    for program, ms in (*map(proven, found.best), *published):
        if ms <= best_ms:
            return Searched(program, ms, best_ms)
    raise AssertionError("the best of those that are published is no slower than itself")
