"""The problem of a search as arrays: times of actions, what they wait for, bytes that they take or free.

A job shop whose machines have memory. An action's number is (kind × positions + position) × micro-batches +
micro-batch, of the kinds F, D and W, or F and B where backwards are whole; a position is a part of the model, counted
from its start. An order is an array of stages × actions of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenpipe.order_search.costs import Part, RunCosts
from evenpipe.schedule.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind
from evenpipe.schedule.topology import Places

__all__ = ["Graph", "Numbers", "Order", "Problem"]

Numbers = NDArray[Any]
#: stages × actions of a stage: their numbers.
Order = NDArray[np.int32]


class Graph(NamedTuple):
    """Columns of actions and of stages, which numba takes as they are.

    Per action: its stage, the action that it awaits (−1: none) and how long after the end of that, the action that
    awaits it (−1: none), and by how many bytes it changes what its stage holds. Per stage: how many bytes it may hold,
    and the positions of its parts. ``shared``: links carry messages of several parts, so that a stage's forwards keep
    their order, and so do its backwards.
    """

    stage: Numbers
    awaits: Numbers
    message_ms: Numbers
    gives: Numbers
    change: Numbers
    cap: Numbers
    parts: Numbers
    micro_batches: int
    shared: bool


@dataclass(frozen=True)
class Problem:
    """The parts' costs on their places, with so many micro-batches; ``cap`` has the bytes that each stage may hold.

    split: backwards come in halves. Messages between two stages take ``message_ms``, within one none. ``recomputed``:
    the positions of parts that are computed again.
    """

    places: Places
    micro_batches: int
    parts: Sequence[Part]
    cap: Sequence[float]
    message_ms: float = 0.0
    split: bool = True
    recomputed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, costs: RunCosts, stages: int, micro_batches: int, split: bool = True) -> Problem:
        """Return the problem of a document. Raises :class:`ScheduleError` where it does not fit so many stages."""
        places = costs.places(stages)
        return cls(places, micro_batches, costs.parts, costs.caps(stages), costs.message_ms, split)

    @property
    def recomputable(self) -> frozenset[int]:
        """The positions of parts that may be computed again.

        Only where backwards are in halves: what a whole one holds while it computes again is unknown.
        """
        able = {at for at, one in enumerate(self.parts) if one.recomputed_bytes is not None}
        return frozenset(able if self.split else ())

    @cached_property
    def _placed(self) -> Sequence[Part]:
        return [one.recomputed() if at in self.recomputed else one for at, one in enumerate(self.parts)]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of actions, in the order of their numbers."""
        return (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) if self.split else (FORWARD, BACKWARD)

    @cached_property
    def takes_ms(self) -> Numbers:
        """Per action, its time."""
        return np.repeat(self._of_kinds(_halves_ms(self._placed)).ravel(), self.micro_batches)

    def _of_kinds(self, of_halves: Numbers) -> Numbers:
        return of_halves if self.split else np.stack([of_halves[0], of_halves[1] + of_halves[2]])

    @cached_property
    def graph(self) -> Graph:
        """The columns of all actions."""
        count, positions = self.micro_batches, len(self.parts)
        numbers = np.arange(len(self.kinds) * positions * count, dtype=np.int32)
        kind, position = numbers // (positions * count), numbers // count % positions
        on = np.array([place.stage for place in self.places.order], np.int32)
        awaits = np.full(len(numbers), -1, np.int32)
        forward, backward = (kind == 0) & (position > 0), (kind == 1) & (position < positions - 1)
        turn = (kind == 1) & (position == positions - 1)
        for which, by in ((forward, -count), (backward, count), (turn, -positions * count)):
            awaits[which] = numbers[which] + by
        gives = np.full(len(numbers), -1, np.int32)
        gives[awaits[awaits >= 0]] = numbers[awaits >= 0]
        stage = on[position]
        message_ms = np.where((awaits >= 0) & (stage[awaits] != stage), self.message_ms, 0.0)
        saved = np.array([one.saved_bytes for one in self._placed], float)
        freed = np.array([one.freed_by_input_gradient_bytes for one in self._placed], float)
        change = np.repeat(self._of_kinds(np.stack([saved, -freed, freed - saved])).ravel(), count)
        parts = np.array([np.flatnonzero(on == one) for one in range(self.places.stages)], np.int32)
        ways = list(pairwise(on.tolist()))
        shared = len(ways) > len(set(ways))
        return Graph(stage, awaits, message_ms, gives, change, np.array(self.cap, float), parts, count, shared)

    @property
    def limit_ms(self) -> float:
        """No order is faster: the busiest stage computes all the time, and nothing again."""
        on = [place.stage for place in self.places.order]
        return float(np.bincount(on, _halves_ms(self.parts).sum(axis=0)).max()) * self.micro_batches

    @property
    def saved_bytes(self) -> Numbers:
        """Per stage, what a forward of each of its parts saves."""
        return self._of_parts([one.saved_bytes for one in self._placed])

    @property
    def moving_bytes(self) -> Numbers:
        """Per stage, what of that may leave it."""
        return self._of_parts([one.moving_bytes for one in self._placed])

    @property
    def grown_bytes(self) -> Numbers:
        """Per stage, by how much each part's input gradient leaves more than was saved."""
        return self._of_parts([one.grown_bytes for one in self._placed])

    def _of_parts(self, numbers: Sequence[int]) -> Numbers:
        of_stages: Numbers = np.array(numbers)[self.graph.parts]
        return of_stages

    @property
    def least_bytes(self) -> Numbers:
        """Per stage, the most that it holds of one micro-batch alone: no order needs less."""
        before = self.saved_bytes.cumsum(axis=1)  # a part's input gradient comes when later parts hold nothing any more
        if not self.split:
            return before[:, -1]
        least: Numbers = (before + self.grown_bytes).max(axis=1)
        return least

    def order(self, rows: Sequence[Sequence[Action]]) -> Order:
        """Return these stages' actions as numbers. A whole backward counts as both halves, where there are halves."""
        numbers = {kind: [number] for number, kind in enumerate(self.kinds)}
        if self.split:
            numbers[BACKWARD] = [1, 2]
        return np.array(
            [
                [
                    (kind * len(self.parts) + self.places.position(stage, one.chunk)) * self.micro_batches
                    + one.micro_batch
                    for one in row
                    for kind in numbers[one.kind]
                ]
                for stage, row in enumerate(rows)
            ],
            np.int32,
        )

    def actions(self, order: Order) -> tuple[tuple[Action, ...], ...]:
        """Return the actions that these numbers are."""
        kinds, places = self.kinds, self.places.order
        parts = (divmod(number, self.micro_batches) for number in order.ravel().tolist())
        flat = [
            Action(kinds[part // len(places)], micro_batch, places[part % len(places)].chunk)
            for part, micro_batch in parts
        ]
        width = order.shape[1]
        return tuple(tuple(flat[at : at + width]) for at in range(0, len(flat), width))

    def peak_bytes(self, order: Order) -> Numbers:
        """Per stage, the most that it holds."""
        peak: Numbers = np.cumsum(self.graph.change[order], axis=1).max(axis=1)
        return peak

    def fits(self, order: Order) -> bool:
        """Return whether no stage ever holds more than it may, and each link's ends have the same order."""
        return bool((self.peak_bytes(order) <= self.graph.cap).all()) and self._in_order(order)

    def _in_order(self, order: Order) -> bool:
        if not self.graph.shared:
            return True
        place = np.empty(order.size, np.int64)
        place[order] = np.arange(order.shape[1])
        for row in order:
            taken = self.graph.awaits[row]
            kind, source = row // (len(self.parts) * self.micro_batches), self.graph.stage[taken]
            for way in set(zip(kind[taken >= 0].tolist(), source[taken >= 0].tolist(), strict=True)):
                sent = place[taken[(taken >= 0) & (kind == way[0]) & (source == way[1])]]
                if (np.diff(sent) < 0).any():
                    return False
        return True


def _halves_ms(parts: Sequence[Part]) -> Numbers:
    """Return three rows, the times of F, of D and of W, with a column a part."""
    return np.array([[one.forward_ms, one.input_gradient_ms, one.weight_gradient_ms] for one in parts]).T
