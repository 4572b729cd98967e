"""One order for a whole pipeline: where in it each action and each message is, so that no stage can wait for ever.

On a device everything awaits *all* of a fixed set of things: an action what its stage was given before it and what it
takes, a message both its ends, a synchronisation whatever is under way. So a pipeline hangs if and only if there is a
circle. If what every stage is given is its part of one order of everything, in which a message has one place at which
both of its stages have their end, and comes after what makes it and before what takes it, then all that is awaited
comes before what awaits it. There is no circle, whatever is synchronised and wherever: with one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) or many, with shared communicators, with CUDA_LAUNCH_BLOCKING=1.

Any such order is safe. This one costs next to nothing: it follows a clock (:func:`walk`), and a clock that is wrong
costs time only. A message comes right after what makes it, so a receive is posted before the first action that ends
later. Where all that a stage is given passes one queue, what is not there yet holds up what was given after it: then a
message is put off until it just arrives in time, or until its sender is about to end what it computes next. Where hosts
wait at compute for all that they have given, also for receives whose messages are still to be made, a message takes
nothing by the clock: of two stages' computes that end at once, neither then has the other's message before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from evenpipe.schedule.actions import BACKWARD, FORWARD, KINDS
from evenpipe.schedule.schedule import Schedule, fault_of, marked
from evenpipe.schedule.table import Column, by_kind
from evenpipe.schedule.topology import Link
from evenpipe.schedule.wiring import Wiring

__all__ = ["OF_FORWARD", "Clock", "Event", "Order", "Queues", "boundaries", "strictest", "walk"]

#: What holds up what a stage's host gives its device, beside the stream that it is for. many: nothing. one: all that
#: was given before, which passes one queue (CUDA_DEVICE_MAX_CONNECTIONS=1). synchronised: the host, which waits at
#: compute for all that it has given (timers, CUDA_LAUNCH_BLOCKING=1). Later ones win.
Queues = Literal["many", "one", "synchronised"]

#: The ticks of a forward, where a backward and a message have theirs, on average over stages.
OF_FORWARD: Final = 1 << 20
#: In ticks. A message takes next to nothing, and not nothing: it arrives after all that ends as it is made. Where there
#: are groups, it may take half a forward and be late by one (Ada-Grouper §4.4), and its receive has been posted.
_MESSAGE: Final = 1 << 10
_OF_GROUPS: Final = 3 * OF_FORWARD // 2
_NEVER: Final = 1 << 62

_TICKS = by_kind(lambda row: row.ticks)


def strictest(kinds: Iterable[Queues]) -> Queues:
    """Return the kind that all stages go by where several hold, of one stage or of different ones; else "many"."""
    return max(kinds, key=get_args(Queues).index, default="many")


class Clock(NamedTuple):
    """How many ticks a forward and a backward take on each stage, and messages on links; on others next to nothing.

    Whole numbers, so that all stages that know the same times find the same order by them.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    messages: Mapping[Link, int]

    @classmethod
    def of(cls, forward_ms: Sequence[float], backward_ms: Sequence[float], message_ms: Mapping[Link, float]) -> Clock:
        """Return the clock of measured times, which are above 0, of one model chunk a stage."""
        tick_ms = math.fsum(forward_ms) / len(forward_ms) / OF_FORWARD
        forward, backward = (tuple(round(ms / tick_ms) for ms in times) for times in (forward_ms, backward_ms))
        return cls(forward, backward, {link: round(ms / tick_ms) for link, ms in message_ms.items()})

    @classmethod
    def assumed(cls, stages: int) -> Clock:
        """Return the clock where nothing is known."""
        return cls((OF_FORWARD,) * stages, (KINDS[BACKWARD].ticks * OF_FORWARD,) * stages, {})

    def ticks(self, schedule: Schedule) -> Column:
        """Return the ticks of each action; a half of a backward takes half of them."""
        table = schedule.table
        forward, backward = (np.array(of, np.int64)[table.stage] for of in (self.forward, self.backward))
        halves = _TICKS[table.kind].astype(np.int64)
        return np.where(table.kind == ord(FORWARD), forward, backward * halves // KINDS[BACKWARD].ticks)


class Walk(NamedTuple):
    """``ends``: when each action ends; of a transfer between partners, when both have begun it.

    ``places``: numbers that grow along each stage, and from all that an action awaits to the action. Both ends of a
    transfer between partners have one place. So actions in the order of their places are one order of everything, which
    all stages can keep to. A place is the time of the action's end, or as near after it as can be. ``batches``: the
    first place after all that a batch computes.
    """

    ends: Column
    places: Column
    batches: Column


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
    other end, which its stage has to have come to; of other actions, themselves. With two weight versions, an update
    awaits all stages' compute of its batch.

    Raises :class:`ScheduleError` where stages wait for one another in a circle: this is where that is found out.
    """
    table = schedule.table
    count, stages = len(table.kind), len(schedule.actions)
    last = table.first[1:]
    # One row more, for whoever is through: it awaits nothing, and is over.
    before = [np.append(np.where(of >= 0, of, count), count) for of in awaited if (of >= 0).any() or of is awaited[0]]
    delay = np.zeros(count + 1, np.int64)
    delay[:-1] = later
    stage_of = np.append(table.stage, 0)
    mate = None if mates is None else np.append(mates, count)
    gathers = schedule.weight_versions > 1 and table.of_batch.any()
    batches = _Batches(schedule) if gathers else None
    ends, places = np.zeros((2, count + 1), np.int64)
    over = np.zeros(count + 1, bool)
    over[count] = True
    at = table.first[:-1].copy()
    now, place = np.zeros((2, stages), np.int64)
    while True:
        able = at < last
        for of in before:
            able &= over[of[at]]
        if batches is not None:
            able &= batches.may(at)
        if mate is not None:
            partner = stage_of[mate[at]]
            able &= at[partner] == mate[at]
            able &= able[partner]
        going = np.flatnonzero(able)
        if not len(going):
            break
        actions = at[going]
        waited = before[0][actions]
        starts = np.maximum(now[going], ends[waited] + delay[actions])
        placed = np.maximum(place[going], places[waited])
        for of in before[1:]:
            waited = of[actions]
            starts, placed = np.maximum(starts, ends[waited]), np.maximum(placed, places[waited])
        if batches is not None:
            starts, placed = batches.after(actions, starts, placed)
        ended = starts + ticks[actions]
        if mate is None:
            ends[actions] = now[going] = ended
            place[going] = np.maximum(placed + 1, ended)
        else:
            ends[actions] = ended
            others = mate[actions]
            now[going] = np.where(others == actions, ended, now[going])  # a transfer waits by itself
            ends[actions] = np.maximum(ended, ends[others])
            place[going] = np.maximum(placed + 1, now[going])
            place[going] = np.maximum(place[going], place[stage_of[others]])
        places[actions] = place[going]
        over[actions] = True
        at[going] += 1
        if batches is not None:
            batches.done(actions, ends[actions], places[actions])
    for waiting in at[at < last].tolist()[:1]:
        with marked(schedule):
            raise fault_of(schedule, waiting, "waits for ever: the stages wait for one another in a circle")
    return Walk(ends[:-1], places[:-1], np.zeros(0, np.int64) if batches is None else batches.places + 1)


class _Batches:
    """The rest of each batch of a stream, and when its last part ended."""

    def __init__(self, schedule: Schedule) -> None:
        table = schedule.table
        self._updates = np.append(table.of_batch, False)
        self._finishes = np.append(table.finishing, False)
        batch = np.where(self._updates[:-1], table.micro_batch, table.micro_batch // schedule.micro_batches)
        self._batch = np.append(batch, 0)
        self._left = np.bincount(batch[self._finishes[:-1]], minlength=schedule.batches)
        self._ends, self.places = np.zeros((2, schedule.batches), np.int64)

    def may(self, actions: Column) -> Column:
        """Return whether each action is no update, or one of a batch that is over."""
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

    The schedule has no other actions. Raises :class:`ScheduleError` if they wait for one another in a circle.
    """
    table = schedule.table
    ends = walk(schedule, _TICKS[table.kind], [Wiring(schedule).senders]).ends
    return [ends[table.of(stage)] for stage in range(schedule.stages)]


class Event(NamedTuple):
    """Something that a stage is given between two of its actions; ``next_action`` is the first that comes after it.

    ``message``: the end of a message, known by the action that takes it; ``sends``: the end that sends, part of
    the action right before that. Or, where that is -1, the gathering of what all stages know of a ``batch``.
    """

    next_action: int
    place: int
    message: int
    sends: bool = False
    batch: int = -1


class Order:
    """The order of a schedule's actions and messages, which are known by the number of the action that takes them.

    ``places``: of each action, that of its end on the clock, as near as what it awaits allows. ``messages``: of what an
    action takes by a link; -1 where it takes nothing so. An action comes before a message of the same place.
    ``posted``: the first action of the taking stage that comes after the message. ``batches``: of each batch of a
    stream, the place of its gathering: all stages have computed it, and none has come to its update; as late as can
    be, so that what a stage still has to add up of its gradients runs beside a forward.

    Raises :class:`ScheduleError` where there is no such order.
    """

    def __init__(self, wiring: Wiring, queues: Queues = "many", clock: Clock | None = None) -> None:
        schedule, table = wiring.schedule, wiring.schedule.table
        self.wiring = wiring
        grouped = schedule.group_size > 1
        if clock is None or (grouped and queues == "one"):  # there, what is put off by measured times is late
            clock = Clock.assumed(schedule.stages)
        ticks = clock.ticks(schedule)
        least, known = (0, {}) if queues == "synchronised" else (_MESSAGE, clock.messages)
        assumed = _OF_GROUPS if grouped and queues == "many" else least
        of_links = np.array([*(max(least, known.get(link, assumed)) for link in wiring.links), assumed])
        self._message = np.where(wiring.computes, of_links[wiring.link_of], least)
        self._walk = self._walked(ticks)
        self.places = self._walk.places
        self.batches = self._gatherings()
        taking = np.flatnonzero(wiring.remote & wiring.computes)
        self.messages = np.full(len(ticks), -1, np.int64)
        self.messages[taking] = self.places[wiring.senders[taking]]
        if queues == "one":
            self.messages[taking] = self._put_off(taking, (self._walk.ends - ticks - self._message)[taking])
        self.posted = np.full(len(ticks), -1, np.int64)
        self.posted[taking] = self._first_after(table.stage[taking], self.messages[taking])

    def _walked(self, ticks: Column) -> Walk:
        wiring, table = self.wiring, self.wiring.schedule.table
        computed_from = np.where(wiring.computes, wiring.senders, -1)
        partners = np.where(table.which(lambda row: row.sends), wiring.gives, wiring.senders)
        traded = table.which(lambda row: row.sends != row.receives) & (partners >= 0)
        mates = np.where(traded, partners, np.arange(len(partners))) if traded.any() else None
        awaited = [computed_from, wiring.after, wiring.departed]
        return walk(wiring.schedule, ticks, awaited, self._message * wiring.remote, mates)

    def _gatherings(self) -> Column:
        table, gathered = self.wiring.schedule.table, self._walk.batches.copy()
        updates = np.flatnonzero(table.of_batch)
        if len(updates) and len(gathered):
            before = np.full(len(gathered), _NEVER)
            np.minimum.at(before, table.micro_batch[updates], self.places[updates - 1])
            gathered = np.maximum(gathered, before)
        return gathered

    def _put_off(self, taking: Column, due: Column) -> Column:
        """The places of messages that are ``due`` then: later than what makes them, and before the sender's next."""
        table = self.wiring.schedule.table
        senders = self.wiring.senders[taking]
        last = senders + 1 == table.first[table.stage[senders] + 1]
        following_places = np.append(self.places, _NEVER)[senders + 1]
        latest = np.where(last, _NEVER, following_places - 1)
        places: Column = np.maximum(self.places[senders], np.minimum(due, latest))
        return places

    def _first_after(self, stages: Column, places: Column) -> Column:
        """Return, per stage, the first action that comes after the place; the number after its last if none does."""
        table = self.wiring.schedule.table
        span = int(self.places.max(initial=0)) + 2
        rows = table.stage * np.int64(span) + self.places
        first: Column = np.searchsorted(rows, stages * np.int64(span) + np.minimum(places, span - 1), side="right")
        return first

    def posts(self, stage: int) -> tuple[Column, Column]:
        """Return the receives of a stage in their order: before which action they are posted, and the message."""
        rows = self.wiring.schedule.table.of(stage)
        received = rows.start + np.flatnonzero(self.messages[rows] >= 0)
        received = received[np.lexsort((received, self.messages[received]))]
        return self.posted[received], received

    def messages_at_once(self, stage: int) -> int:
        """The most that a stage receives and sends at once: receives from when they are posted until the compute on
        them ends, results until they are known to have arrived.
        """
        wiring = self.wiring
        rows = wiring.schedule.table.of(stage)
        posted, received = self.posts(stage)
        given = wiring.gives[rows]
        sending = rows.start + np.flatnonzero((given >= 0) & (self.messages[given] >= 0))
        waiting = rows.start + np.flatnonzero(wiring.settles[rows] >= 0)
        change = np.zeros(rows.stop - rows.start + 1, np.int64)
        for actions, by in ((posted, 1), (received + 1, -1), (sending, 1), (waiting, -1)):
            np.add.at(change, actions - rows.start, by)
        return int(np.cumsum(change).max())

    def events(self, stage: int, gatherings: Column) -> list[Event]:
        """Return what a stage is given beside its actions, in order, with ``gatherings`` of batches at these places."""
        wiring, rows = self.wiring, self.wiring.schedule.table.of(stage)
        posted, received = self.posts(stage)
        given = wiring.gives[rows]
        sent = given[(given >= 0) & (self.messages[given] >= 0)]
        gathered = self._first_after(np.full(len(gatherings), stage), gatherings)

        def ends(before: Column, messages: Column, sends: bool) -> Iterable[Event]:
            columns = before.tolist(), self.messages[messages].tolist(), messages.tolist()
            return (Event(*end, sends) for end in zip(*columns, strict=True))

        numbered = enumerate(zip(gathered.tolist(), gatherings.tolist(), strict=True))
        events = [
            *ends(posted, received, sends=False),
            *ends(wiring.senders[sent] + 1, sent, sends=True),
            *(Event(before, place, -1, batch=batch) for batch, (before, place) in numbered),
        ]
        return sorted(events, key=lambda event: (event.place, event.message < 0, event.message, event.batch))
