"""How many units one stage holds while it walks its actions, and when a departing one must be gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from evenpipe.schedule.actions import Action, Unit
from evenpipe.schedule.kinds import ACCEPT, COMPUTE, KINDS, LOAD

__all__ = ["Residency", "own_peak", "residency"]

_HELD = {letter: row.held for letter, row in KINDS.items()}
_OWN_HELD = {letter: row.held if letter in COMPUTE else 0 for letter, row in KINDS.items()}
_LEAVING = frozenset(letter for letter, row in KINDS.items() if row.link is not None and row.held < 0)


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
        change = _HELD[kind]
        if change > 0:
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
        elif kind in _LEAVING:
            leaving.append(action.unit)
        else:
            live += change
        due.append(waits)
    return Residency(peak, tuple(due), broken)


def own_peak(row: Sequence[Action]) -> int:
    """The most units of its own that a stage without evictions holds: forwards less those whose backward is done."""
    return max(accumulate((_OWN_HELD[action.kind] for action in row), initial=0))
