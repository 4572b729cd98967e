"""Evictions of a searched order: what a stage holds beyond its cap is at its partner, or on its host.

An order is searched for caps that partners share, or that are larger by what hosts take, and BPipe's pass
(:mod:`evenpipe.schedule.bpipe`) gives it transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from evenpipe.order_search.clock import NEVER
from evenpipe.order_search.problem import Problem
from evenpipe.order_search.recomputing import quick_ms, recomputations
from evenpipe.schedule.bpipe import balance, swapped
from evenpipe.schedule.order import Queues
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.table import own_peak
from evenpipe.schedule.topology import partner

__all__ = ["lent", "sharing", "with_evictions", "with_swaps_to_hosts"]

#: What acceptors keep for themselves: of what their place in 1F1B holds, in steps of a quarter.
_SHARES: Final = tuple(quarter / 4 for quarter in range(1, 13))
#: What hosts take, as parts of what stages may hold.
_LENT: Final = (0.25, 0.5, 1.0)
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


def lent(problem: Problem) -> list[Problem]:
    """Return a few problems in which stages may hold more, as if the rest were on their hosts; none without caps."""
    if not all(map(math.isfinite, problem.cap)):
        return []
    grown = [replace(problem, cap=[cap * (1 + more) for cap in problem.cap]) for more in _LENT]
    return [replace(each, recomputed=choice) for each in grown for choice in recomputations(each)[:1]]


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
    problem, stages = replace(problem, recomputed=schedule.recomputed), schedule.stages
    own_bytes = problem.peak_bytes(problem.order(schedule.actions))
    if (own_bytes <= problem.cap).all():
        return schedule
    bounds, moving = _whole_units(schedule, problem), problem.moving_bytes.max(axis=1).tolist()
    for evictor in range(stages // 2):
        if own_bytes[evictor] > problem.cap[evictor]:
            acceptor = partner(evictor, stages)
            bounds[acceptor] += int(problem.cap[acceptor] - own_bytes[acceptor]) // max(1, moving[evictor])
    return balance(schedule, bounds, queues)


def with_swaps_to_hosts(schedule: Schedule, problem: Problem) -> Schedule:
    """Return an order for the caps of :func:`lent` with swaps, by which stages keep to those of ``problem``.

    Raises as :func:`with_evictions` does; verify the schedule and its bytes.
    """
    problem = replace(problem, recomputed=schedule.recomputed)
    if problem.fits(problem.order(schedule.actions)):
        return schedule
    return swapped(schedule, _whole_units(schedule, problem))


def _whole_units(schedule: Schedule, problem: Problem) -> list[int]:
    """Return, per stage, how many units it may hold whole: all that are live at once, unless its cap has less room.

    Of each live unit some stays, and of one a gradient's bytes are there too.
    """
    held = problem.peak_bytes(problem.order(schedule.actions))
    staying = problem.saved_bytes - problem.moving_bytes
    bounds = []
    for stage, cap in enumerate(problem.cap):
        live = own_peak(schedule.table.kind[schedule.table.of(stage)])
        kept = int(problem.grown_bytes[stage].max()) + live * int(staying[stage].max())
        room = max(1, int(cap - kept) // max(1, int(problem.moving_bytes[stage].max())))
        bounds.append(live if held[stage] <= cap else min(live, room))
    return bounds
