"""Evictions of a searched order: what a stage holds beyond its cap is at its partner, which has room beside its own.

An order is searched for caps that partners share, and BPipe's pass (:mod:`evenpipe.schedule.bpipe`) gives it transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from evenpipe.schedule.bpipe import balance
from evenpipe.schedule.order import Queues
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.search.clock import NEVER
from evenpipe.schedule.search.problem import Problem
from evenpipe.schedule.search.recomputing import quick_ms, recomputations
from evenpipe.schedule.table import own_peak
from evenpipe.schedule.topology import partner

__all__ = ["sharing", "with_evictions"]

#: What acceptors keep for themselves: of what their place in 1F1B holds, in steps of a quarter.
_SHARES: Final = tuple(quarter / 4 for quarter in range(1, 13))
#: The most problems that are returned, and the most for which choices of recomputed parts are tried.
_SEARCHED: Final = 2
_CHOSEN: Final = 2


def sharing(problem: Problem) -> list[Problem]:
    """Return a few problems in which evictors have the room that their acceptors leave, the most promising first.

    There are none unless the placement is straight and all caps are finite. One unit a pair stays free: a unit under
    way counts on both stages.
    """
    if problem.places.chunks > 1 or not all(map(math.isfinite, problem.cap)):
        return []
    chosen = sorted(_shared(problem), key=quick_ms)[:_CHOSEN]
    found = [replace(each, recomputed=choice) for each in chosen for choice in recomputations(each)]
    return sorted((each for each in found if quick_ms(each) < NEVER), key=quick_ms)[:_SEARCHED]


def _shared(problem: Problem) -> Iterator[Problem]:
    stages = problem.places.stages
    saved = [max(1, *row) for row in problem.saved_bytes.tolist()]
    moved = [max(1, *row) for row in problem.moving_bytes.tolist()]
    before = [list(problem.cap)]
    for share in _SHARES:
        caps = list(problem.cap)
        for evictor in range(stages // 2):
            acceptor = partner(evictor, stages)
            units = max(1, math.ceil(share * (evictor + 1)))
            own = int(problem.least_bytes[acceptor]) + (units - 1) * saved[acceptor]
            guests = int(caps[acceptor] - own) // moved[evictor]
            if guests > 1 and problem.least_bytes[evictor] == saved[evictor]:
                caps[acceptor] -= guests * moved[evictor]
                caps[evictor] += (guests - 1) * moved[evictor]
        if caps not in before:
            before.append(caps)
            yield replace(problem, cap=caps)


def with_evictions(schedule: Schedule, problem: Problem, queues: Queues = "many") -> Schedule:
    """Return an order for shared caps with evictions, by which stages keep to their own caps, those of ``problem``.

    An order that already keeps to them is returned as it is. Raises :class:`ScheduleError` where an evictor cannot
    keep to its cap; other stages are not checked, so verify the schedule.
    """
    table, stages = schedule.table, schedule.stages
    problem = replace(problem, recomputed=schedule.recomputed)
    order = problem.order(schedule.actions)
    if problem.fits(order):
        return schedule
    own_bytes = problem.peak_bytes(order)
    saved_bytes, moving_bytes = problem.saved_bytes.tolist(), problem.moving_bytes.tolist()
    bounds = [own_peak(table.kind[table.of(stage)]) for stage in range(stages)]
    for evictor in range(stages // 2):
        if own_bytes[evictor] > problem.cap[evictor]:
            acceptor, [saved], [moved] = partner(evictor, stages), *(of[evictor] for of in (saved_bytes, moving_bytes))
            # Of all that it holds, here or there, some stays; one unit has its gradients' bytes too.
            kept = int(problem.least_bytes[evictor]) - saved + bounds[evictor] * (saved - moved)
            bounds[evictor] = max(1, int(problem.cap[evictor] - kept) // max(1, moved))
            bounds[acceptor] += int(problem.cap[acceptor] - own_bytes[acceptor]) // max(1, moved)
    return balance(schedule, bounds, queues)
