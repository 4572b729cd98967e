"""How many units one stage holds while it walks its actions, and when a departing one must be gone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenpipe.schedule.kinds import KINDS, LOAD
from evenpipe.schedule.table import Column, Table, by_kind, own_peak

__all__ = ["LEAVING", "Residency", "residency"]

_HELD = by_kind(lambda row: row.held)
#: Of each kind, whether it is a transfer with whose completion a unit is no longer here.
LEAVING = by_kind(lambda row: row.link is not None and row.held < 0)
_GUEST = by_kind(lambda row: KINDS[row.letter].guest)


@dataclass(frozen=True, eq=False)
class Residency:
    """``peak``: most live units at once. ``gone``: how many departures are complete when an action starts: the oldest.

    ``broken``: index of the first action that goes beyond the bound, or None.
    """

    peak: int
    gone: Column
    broken: int | None


def residency(table: Table, stage: int, bound: int) -> Residency:
    """Live units of one stage, with every departure completed as late as ``bound`` allows.

    A transfer starts where it is listed and runs beside what follows. Its unit is live here until the transfer is
    complete, which is waited for only where one more unit would break the bound, or where the same unit comes back.
    An acceptor keeps memory for guests beside that for its own units at their peak, so guests have what is left of the
    bound.
    """
    rows = table.of(stage)
    kind = table.kind[rows]
    leaves, held = LEAVING[kind], _HELD[kind]
    arrives = held > 0
    accepts = arrives & (_GUEST[kind] > 0)
    room_for_guests = bound - own_peak(kind)
    # As if nothing departed:
    live, guests = np.cumsum(np.where(leaves, 0, held)), np.cumsum(accepts)
    departed = np.cumsum(leaves)
    excess = np.maximum(live - bound, np.where(accepts, guests - room_for_guests, 0))
    comes_back = np.where((kind == ord(LOAD)) & (table.previous[rows] >= 0), table.previous[rows] - rows.start, -1)
    back = np.where((comes_back >= 0) & (leaves[comes_back] > 0), departed[comes_back], 0) if len(kind) else live
    needed = np.where(arrives, np.maximum(np.minimum(departed, excess), back), 0)
    gone = np.maximum.accumulate(needed) if len(kind) else needed
    live, guests = live - gone, guests - gone
    beyond = np.flatnonzero(arrives & ((live > bound) | (guests > max(0, room_for_guests))))
    return Residency(int(live[arrives].max(initial=0)), gone.astype(np.int32), int(beyond[0]) if len(beyond) else None)
