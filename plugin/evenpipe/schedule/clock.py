"""A clock in whole ticks: how long things take, when each action ends, and an order of actions that agrees with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.kinds import FINISHING, FORWARD, KINDS
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.table import Column, by_kind
from evenpipe.schedule.topology import Link
from evenpipe.schedule.wiring import senders

__all__ = ["OF_FORWARD", "TICKS", "Clock", "Walk", "boundaries", "walk"]

#: By kind: see :class:`evenpipe.schedule.kinds.ActionKind`.
TICKS: Final = {letter: row.ticks for letter, row in KINDS.items()}
_TICKS = by_kind(lambda row: row.ticks)
_OF_BATCH = by_kind(lambda row: row.of_batch)
_FINISHING = by_kind(lambda row: row.letter in FINISHING)
#: The ticks of a forward, where a backward and a message have theirs, on average over stages.
OF_FORWARD: Final = 1 << 20


class Clock(NamedTuple):
    """How many ticks a forward and a backward take on each stage, and messages on links; on others next to nothing.

    Whole numbers, so that all stages that know the same times find the same order by them.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    messages: Mapping[Link, int]

    @classmethod
    def of(cls, forward_ms: Sequence[float], backward_ms: Sequence[float], message_ms: Mapping[Link, float]) -> Clock:
        """The clock of measured times, which are above 0, of one model chunk a stage."""
        tick_ms = math.fsum(forward_ms) / len(forward_ms) / OF_FORWARD
        forward, backward = (tuple(round(ms / tick_ms) for ms in times) for times in (forward_ms, backward_ms))
        return cls(forward, backward, {link: round(ms / tick_ms) for link, ms in message_ms.items()})

    @classmethod
    def assumed(cls, stages: int) -> Clock:
        """The clock where nothing is known."""
        return cls((OF_FORWARD,) * stages, (TICKS["B"] * OF_FORWARD,) * stages, {})

    def ticks(self, schedule: Schedule) -> Column:
        """What each action takes; the halves of a backward take half of it."""
        table = schedule.table
        forward, backward = (np.array(of, np.int64)[table.stage] for of in (self.forward, self.backward))
        halves = _TICKS[table.kind].astype(np.int64)
        return np.where(table.kind == ord(FORWARD), forward, backward * halves // TICKS["B"])


class Walk(NamedTuple):
    """``ends``: when each action ends; of a transfer between partners, when both have begun it.

    ``places``: numbers that grow along each stage, and from all that an action awaits to the action. Both ends of a
    transfer between partners have one place. So actions in the order of their places are one order of everything, which
    all stages can keep to. A place is the time of the action's end, or as near after it as can be. ``batches``: the
    first place after all that a batch computes. ``reached``: per stage, the number of the first action that waits for
    ever; where there is none, the number after its last.
    """

    ends: Column
    places: Column
    batches: Column
    reached: Column


def walk(
    schedule: Schedule,
    ticks: Column,
    awaited: Sequence[Column],
    later: Column | int = 0,
    mates: Column | None = None,
) -> Walk:
    """Carry out the actions of all stages at once, one each wherever what that awaits is over, until none gets on.

    ``ticks``: how long each action takes. ``awaited``: per action, others that must be over before it (-1: none); and
    for the first of these, how much ``later`` than that it may begin. ``mates``: of a transfer between partners, the
    other end, which its stage has to have come to; of other actions, themselves. An update awaits all stages' compute
    of its batch.
    """
    table = schedule.table
    count, stages = len(table.kind), len(schedule.actions)
    last = table.first[1:]
    # One row more, for whoever is through: it awaits nothing, and is over.
    before = np.full((count + 1, len(awaited)), count, np.int32)
    for column, actions in enumerate(awaited):
        before[:-1, column] = np.where(actions >= 0, actions, count)
    delay = np.zeros(count + 1, np.int64)
    delay[:-1] = later
    stage_of = np.append(table.stage, 0)
    mate = np.append(np.arange(count) if mates is None else mates, count)
    batches = _Batches(schedule) if np.any(_OF_BATCH[table.kind]) else None
    ends, places = np.zeros((2, count + 1), np.int64)
    over = np.zeros(count + 1, bool)
    over[count] = True
    at = table.first[:-1].copy()
    now, place = np.zeros((2, stages), np.int64)
    while True:
        able = (at < last) & over[before[at]].all(axis=1)
        if batches is not None:
            able &= batches.may(at)
        partner = stage_of[mate[at]]
        able &= at[partner] == mate[at]
        able &= able[partner]
        going = np.flatnonzero(able)
        if not len(going):
            break
        actions = at[going]
        those = before[actions]
        there = ends[those]
        there[:, 0] += delay[actions]
        starts = np.maximum(now[going], there.max(axis=1))
        placed = np.maximum(place[going], places[those].max(axis=1))
        if batches is not None:
            starts, placed = batches.after(actions, starts, placed)
        others = mate[actions]
        ends[actions] = starts + ticks[actions]
        now[going] = np.where(others == actions, ends[actions], now[going])  # a transfer waits by itself
        ends[actions] = np.maximum(ends[actions], ends[others])
        place[going] = np.maximum(placed + 1, now[going])
        place[going] = np.maximum(place[going], place[stage_of[others]])
        places[actions] = place[going]
        over[actions] = True
        at[going] += 1
        if batches is not None:
            batches.done(actions, ends[actions], places[actions])
    return Walk(ends[:-1], places[:-1], np.zeros(0, np.int64) if batches is None else batches.places + 1, at)


class _Batches:
    """What is left of each batch of a stream, and when the last of it ended."""

    def __init__(self, schedule: Schedule) -> None:
        table = schedule.table
        self._updates = np.append(_OF_BATCH[table.kind] > 0, False)
        self._finishes = np.append(_FINISHING[table.kind] > 0, False)
        batch = np.where(self._updates[:-1], table.micro_batch, table.micro_batch // schedule.micro_batches)
        self._batch = np.append(batch, 0)
        self._left = np.bincount(batch[self._finishes[:-1]], minlength=schedule.batches)
        self._ends, self.places = np.zeros((2, schedule.batches), np.int64)

    def may(self, actions: Column) -> Column:
        """Whether each action is no update, or one of a batch that is over."""
        able: Column = ~self._updates[actions] | (self._left[self._batch[actions]] == 0)
        return able

    def after(self, actions: Column, starts: Column, places: Column) -> tuple[Column, Column]:
        """When updates start, and the place that theirs comes after; of other actions, what was given."""
        updates, batch = self._updates[actions], self._batch[actions]
        return (
            np.where(updates, np.maximum(starts, self._ends[batch]), starts),
            np.where(updates, np.maximum(places, self.places[batch] + 1), places),
        )

    def done(self, actions: Column, ends: Column, places: Column) -> None:
        finishing = self._finishes[actions]
        batch = self._batch[actions[finishing]]
        np.subtract.at(self._left, batch, 1)
        np.maximum.at(self._ends, batch, ends[finishing])
        np.maximum.at(self.places, batch, places[finishing])


def boundaries(schedule: Schedule) -> list[Column]:
    """Per stage, the times at which its compute actions end, in order, if communication takes nothing.

    The schedule has no other actions. Raises :class:`ScheduleError` if the compute orders wait for one another in a
    circle.
    """
    table = schedule.table
    found = walk(schedule, _TICKS[table.kind], [senders(schedule)])
    for stage in np.flatnonzero(found.reached < table.first[1:]).tolist()[:1]:
        stuck = schedule.actions[stage][int(found.reached[stage] - table.first[stage])]
        raise ScheduleError(f"stage {stage} waits for ever before {stuck}: the compute orders form a circle")
    return [found.ends[table.of(stage)] for stage in range(schedule.stages)]
