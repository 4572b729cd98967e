"""How many units one stage holds while it walks its actions, and when a departing one must be gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from evenpipe.schedule.actions import ACCEPT, ARRIVING, BACKWARD, DEPARTING, FORWARD, LOAD, Action, Unit

__all__ = ["Residency", "own_peak", "residency"]

_ADDING = ARRIVING | {FORWARD}


@dataclass(frozen=True)
class Residency:
    """``peak``: most live units at once. ``due``: per action, how many of the oldest departures must be complete first.

    ``broken``: index of the first action that goes beyond the bound, or None.
    """

    peak: int
    due: tuple[int, ...]
    broken: int | None


def residency(row: Sequence[Action], bound: int) -> Residency:
    """Live units of one stage, with every departure completed as late as ``bound`` allows.

    A transfer starts where it is listed and runs beside what follows. Its unit is live here until the transfer is
    complete, which is waited for only where one more unit would break the bound, or where the same unit comes back.
    An acceptor keeps memory for guests beside that for its own units at their peak, so guests have what is left of the
    bound.
    """
    room_for_guests = bound - own_peak(row)
    live = guests = peak = 0
    broken = None
    leaving: deque[Unit] = deque()
    due = []
    for index, action in enumerate(row):
        kind, waits = action.kind, 0
        if kind in _ADDING:
            excess = max(live + 1 - bound, guests + 1 - room_for_guests if kind == ACCEPT else 0)
            comes_back = leaving.index(action.unit) + 1 if kind == LOAD and action.unit in leaving else 0
            waits = max(comes_back, min(len(leaving), max(0, excess)))
            for _ in range(waits):
                leaving.popleft()
            live += 1 - waits
            if guests or kind == ACCEPT:
                guests += (kind == ACCEPT) - waits
            peak = max(peak, live)
            if broken is None and (live > bound or guests > max(0, room_for_guests)):
                broken = index
        elif kind == BACKWARD:
            live -= 1
        elif kind in DEPARTING:
            leaving.append(action.unit)
        due.append(waits)
    return Residency(peak, tuple(due), broken)


def own_peak(row: Sequence[Action]) -> int:
    """The most units of its own that a stage without evictions holds: forwards less backwards."""
    return max(accumulate(((action.kind == FORWARD) - (action.kind == BACKWARD) for action in row), initial=0))
