"""Orders by a building block, chunks in a V (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362).

A stage repeats its block after every period. That sets its steady part and its memory, but leaves waits in warm-up and
cool-down. Justification to the back closes them (Valls, Ballestín and Quintanilla, European Journal of Operational
Research 165, 2005). Here a pass takes one slot and a message no time; ``search/justifying.py`` has any times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from evenpipe.schedule.actions import FORWARD, INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT, Action, Kind
from evenpipe.schedule.topology import Place, Places, vee

__all__ = ["PERIOD", "Pass", "closed_up", "repeated"]

#: Passes of a micro-batch on a stage with two chunks: F, D and W of each.
PERIOD: Final = 6


class Pass(NamedTuple):
    """The slot, from stage 0's first one, of a stage's forward or input gradient of the first micro-batch."""

    at: int
    kind: Kind
    chunk: int


def repeated(block: Sequence[Pass], micro_batches: int) -> dict[int, Action]:
    """Return a stage's actions by their slots, in order, if its block comes again after every period.

    Weight gradients take the first free slots after their input gradients. Passes are apart, modulo the period.
    """
    given = {one.at + PERIOD * i: Action(one.kind, i, one.chunk) for one in block for i in range(micro_batches)}
    slots, pending, slot = dict[int, Action](), deque[Action](), 0
    while len(slots) < PERIOD * micro_batches:
        action = given.get(slot)
        if action is not None:
            slots[slot] = action
            if action.kind == INPUT_GRADIENT:
                pending.append(action)
        elif pending:
            _, micro_batch, chunk, _ = pending.popleft()
            slots[slot] = Action(WEIGHT_GRADIENT, micro_batch, chunk)
        slot += 1
    return slots


def closed_up(blocks: Sequence[Sequence[Pass]], micro_batches: int) -> list[list[Action]]:
    """Return each stage's order: its block repeated, then each action as late as possible, from the last to the first.

    An action stays before its micro-batch's next passes, and before the next micro-batch's same pass. No stage holds
    more units than in its repeated block.
    """
    places = vee(len(blocks))
    tables = [repeated(block, micro_batches) for block in blocks]
    end = 1 + max(max(table) for table in tables)
    rows = [_Row(table, end) for table in tables]
    slots: dict[tuple[Place, Kind], list[int]] = {
        (place, kind): [end] * (micro_batches + 1)
        for place in places.order
        for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    }
    # By stage, and chunk and kind there: the slots of its own passes, and of those that await them.
    passes: list[dict[tuple[int, Kind], tuple[list[int], list[list[int]]]]] = [{} for _ in tables]
    for (place, kind), own in slots.items():
        passes[place.stage][place.chunk, kind] = own, [slots[one] for one in _awaiting(places, place, kind)]
    for slot in reversed(range(end)):
        for stage, table in enumerate(tables):
            if (action := table.get(slot)) is not None:
                kind, i, chunk, _ = action
                own, awaiting = passes[stage][chunk, kind]
                own[i] = rows[stage].place(action, min([own[i + 1], *(other[i] for other in awaiting)]))
    return [row.order() for row in rows]


def _awaiting(places: Places, place: Place, kind: Kind) -> Iterator[tuple[Place, Kind]]:
    """Yield the passes of a micro-batch that await its pass of that kind at that place."""
    if kind == WEIGHT_GRADIENT:
        return
    neighbour = places.neighbour(*place, KINDS[kind].direction)
    if neighbour is not None:
        yield neighbour, kind
    if kind == INPUT_GRADIENT:
        yield place, WEIGHT_GRADIENT
    elif neighbour is None:
        yield place, INPUT_GRADIENT


class _Row:
    """A stage's slots, filled from the last action to the first."""

    def __init__(self, table: dict[int, Action], end: int) -> None:
        self._most = max(accumulate(KINDS[action.kind].held for action in table.values()))
        self._actions: dict[int, Action] = {}
        self._first = end
        self._live = 0  # units before the first slot

    def place(self, action: Action, before: int) -> int:
        """Give the action the latest free slot that is before ``before`` and leaves no moment too many units."""
        held = KINDS[action.kind].held
        self._live -= held
        slot = (self._full_from(before) if held < 0 else before) - 1
        while slot in self._actions:
            slot -= 1
        self._actions[slot] = action
        self._first = min(self._first, slot)
        return slot

    def _full_from(self, end: int) -> int:
        """Return the first slot, at most ``end``, after which there is no room for one of the units before it."""
        live = self._live
        for slot in range(self._first, end):
            if slot in self._actions:
                live += KINDS[self._actions[slot].kind].held
                if live > self._most:
                    return slot
        return end

    def order(self) -> list[Action]:
        return [self._actions[slot] for slot in sorted(self._actions)]
