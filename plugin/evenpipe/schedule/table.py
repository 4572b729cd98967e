"""All actions of a schedule as columns of numbers, and how many units stages hold on their way through them.

Everything that must be known of millions of actions is worked out on such columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenpipe.schedule.actions import ACCEPT, COMPUTE, FINISHING, KINDS, LOAD, Action, ActionKind

__all__ = ["LEAVING", "Column", "Residency", "Table", "by_kind", "following", "own_peak", "residency"]

Column = NDArray[Any]

_LIMIT = 2**31 - 1
_MANY = 2**24  # more micro-batches, or chunks, than a schedule has


def by_kind(of: Callable[[ActionKind], int]) -> Column:
    """Return ``of`` of each row of KINDS, by letter: ``by_kind(of)[table.kind]`` is that of each action."""
    columns = np.zeros(128, np.int32)
    for row in KINDS.values():
        columns[ord(row.letter)] = of(row)
    return columns


_HELD = by_kind(lambda row: row.held)
_OWN_HELD = by_kind(lambda row: row.held if row.letter in COMPUTE else 0)
#: Of each kind, whether it is a transfer with whose completion a unit is no longer here.
LEAVING = by_kind(lambda row: row.link is not None and row.held < 0)


class Table:
    """The columns, stage after stage: an action's number is that of its place in them.

    ``kind`` is the code of the letter. ``first`` has the number of each stage's first action and, last, how many
    actions there are.
    """

    def __init__(self, rows: Sequence[Sequence[Action]]) -> None:
        lengths = [len(row) for row in rows]
        self.first = np.cumsum([0, *lengths])
        self.stage = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
        letters = "".join(map(itemgetter(0), chain.from_iterable(rows)))
        self.kind = np.frombuffer(letters.encode("ascii"), np.uint8)
        self.micro_batch, self.chunk, self.evictor = (_numbers(rows, field, len(letters)) for field in (1, 2, 3))

    def of(self, stage: int) -> slice:
        """Return the numbers of a stage's actions."""
        return slice(int(self.first[stage]), int(self.first[stage + 1]))

    @cached_property
    def letters(self) -> frozenset[str]:
        """The kinds that there are."""
        return frozenset(map(chr, np.flatnonzero(np.bincount(self.kind))))

    def which(self, holds: Callable[[ActionKind], bool]) -> Column:
        """Return, per action, whether ``holds`` is true of its kind."""
        return by_kind(holds)[self.kind] > 0

    @cached_property
    def computes(self) -> Column:
        """Per action, whether it is compute."""
        return self.which(lambda row: row.letter in COMPUTE)

    @cached_property
    def finishing(self) -> Column:
        """Per action, whether it is the last compute of its unit."""
        return self.which(lambda row: row.letter in FINISHING)

    @cached_property
    def of_batch(self) -> Column:
        """Per action, whether it is an update."""
        return self.which(lambda row: row.of_batch)

    @cached_property
    def previous(self) -> Column:
        """The action before it of the same unit on the same stage; -1 where there is none."""
        part = (2 * self.stage.astype(np.int64) + (self.evictor >= 0)) * _MANY + self.chunk.clip(-1, _MANY - 2)
        unit = np.where(self.of_batch, -1, part * _MANY + self.micro_batch.clip(-1, _MANY - 2))
        order = np.argsort(unit, kind="stable").astype(np.int32)
        same = np.flatnonzero(unit[order[1:]] == unit[order[:-1]])
        previous = np.full(len(unit), -1, np.int32)
        previous[order[same + 1]] = order[same]
        return previous


def _numbers(rows: Sequence[Sequence[Action]], field: int, count: int) -> Column:
    """One field of all actions; what is too large for any schedule stays too large when it is cut off."""
    numbers = map(itemgetter(field), chain.from_iterable(rows))
    try:
        column = np.fromiter(numbers, np.int64, count)
    except OverflowError:
        cut = (max(-_LIMIT, min(action[field], _LIMIT)) for row in rows for action in row)
        column = np.fromiter(cut, np.int64, count)
    return column.clip(-_LIMIT, _LIMIT).astype(np.int32)


def following(column: Column, actions: Column) -> Column:
    """Return ``column`` at these actions; -1 is no action, and stays -1."""
    return np.where(actions >= 0, column[actions], -1) if len(column) else actions


def own_peak(kinds: Column) -> int:
    """The most units of its own that a stage without evictions holds: forwards less those whose backward is done."""
    return int(np.cumsum(_OWN_HELD[kinds]).max(initial=0))


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
    accepts = arrives & (kind == ord(ACCEPT))
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
