"""One order for a whole pipeline: where in it each message is, so that no stage can wait for ever.

On a device everything awaits *all* of a fixed set of things: an action what its stage was given before it and what it
takes, a message both its ends, a synchronisation whatever is under way. So a pipeline hangs if and only if there is a
circle. If what every stage is given is its part of one order of everything, in which a message has one place at which
both of its stages have their end, and comes after what makes it and before what takes it, then all that is awaited
comes before what awaits it. There is no circle, whatever is synchronised and wherever: with one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) or many, with shared communicators, with CUDA_LAUNCH_BLOCKING=1.

Any such order is safe. This one costs next to nothing: it follows a clock, and a clock that is wrong costs time only. A
message comes right after what makes it, so a receive is posted before the first action that ends later. Where all that
a stage is given passes one queue, what is not there yet holds up what was given after it: then a message is put off
until it just arrives in time, or until its sender is about to end what it computes next. Where hosts wait at compute
for all that they have given, also for receives whose messages are still to be made, a message takes nothing by the
clock: of two stages' computes that end at once, neither then has the other's message before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from evenpipe.schedule.clock import OF_FORWARD, Clock, Walk, walk
from evenpipe.schedule.kinds import OWN_ENDS
from evenpipe.schedule.table import Column, by_kind
from evenpipe.schedule.wiring import Wiring

__all__ = ["Event", "Order", "Queues", "strictest"]

#: What holds up what a stage's host gives its device, beside the stream that it is for. many: nothing. one: all that
#: was given before, which passes one queue (CUDA_DEVICE_MAX_CONNECTIONS=1). synchronised: the host, which waits at
#: compute for all that it has given (timers, CUDA_LAUNCH_BLOCKING=1). Later ones win.
Queues = Literal["many", "one", "synchronised"]

#: In ticks. A message takes next to nothing, and not nothing: it arrives after all that ends as it is made. Where there
#: are groups, it may take half a forward and be late by one (Ada-Grouper §4.4), and its receive has been posted.
_MESSAGE: Final = 1 << 10
_OF_GROUPS: Final = 3 * OF_FORWARD // 2
_OF_BATCH = by_kind(lambda row: row.of_batch)
_SENDS = by_kind(lambda row: row.sends)
_TRADED = by_kind(lambda row: row.link is not None and row.letter not in OWN_ENDS)
_NEVER: Final = 1 << 62


def strictest(kinds: Iterable[Queues]) -> Queues:
    """By which all stages go where several hold, of one stage or of different ones; "many" where none does."""
    return max(kinds, key=get_args(Queues).index, default="many")


class Event(NamedTuple):
    """Something that a stage is given between two of its actions; ``before`` is the first action that comes after it.

    ``message``: the end of a message, known by the action that takes it; ``sends``: the end that sends. Or, where that
    is -1, the gathering of what all stages know of a ``batch``.
    """

    before: int
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
    be, so that what a stage still has to add up of its gradients runs beside a forward. ``stuck``: an action that waits
    for ever: the first of the first stage that has one; None where there is an order.
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
        waiting = np.flatnonzero(self._walk.reached < table.first[1:])
        self.stuck = int(self._walk.reached[waiting[0]]) if len(waiting) else None
        self.places = self._walk.places
        if self.stuck is not None:  # of what is never reached, any that grow
            unreached = np.arange(len(ticks)) >= self._walk.reached[table.stage]
            self.places = np.where(unreached, self.places.max() + np.arange(1, len(ticks) + 1), self.places)
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
        partners = np.where(_SENDS[table.kind] > 0, wiring.gives, wiring.senders)
        traded = (_TRADED[table.kind] > 0) & (partners >= 0)
        if not traded.any():
            return walk(wiring.schedule, ticks, [computed_from], self._message * wiring.remote)
        mates = np.where(traded, partners, np.arange(len(partners)))
        awaited = [computed_from, wiring.after, wiring.departed]
        return walk(wiring.schedule, ticks, awaited, self._message * wiring.remote, mates)

    def _gatherings(self) -> Column:
        table, gathered = self.wiring.schedule.table, self._walk.batches.copy()
        updates = np.flatnonzero(_OF_BATCH[table.kind])
        if len(updates):
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
        """Of each stage, the first action that comes after the place; the number after its last where none does."""
        table = self.wiring.schedule.table
        span = int(self.places.max(initial=0)) + 2
        rows = table.stage * np.int64(span) + self.places
        found: Column = np.searchsorted(rows, stages * np.int64(span) + np.minimum(places, span - 1), side="right")
        return found

    def posts(self, stage: int) -> tuple[Column, Column]:
        """The receives of a stage in their order: before which action they are posted, and the message."""
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

    def events(self, stage: int, batches: Column | None = None) -> list[Event]:
        """What a stage is given beside its actions, in order; ``batches``: the places of gatherings, if not its own."""
        batches = self.batches if batches is None else batches
        table, senders = self.wiring.schedule.table, self.wiring.senders
        rows = table.of(stage)
        posted, received = self.posts(stage)
        given = self.wiring.gives[rows]
        sent = given[(given >= 0) & (self.messages[given] >= 0)]
        gathered = self._first_after(np.full(len(batches), stage), batches)
        found = [
            *map(Event, posted.tolist(), self.messages[received].tolist(), received.tolist()),
            *(
                Event(sender + 1, place, taker, True)
                for sender, place, taker in zip(
                    senders[sent].tolist(), self.messages[sent].tolist(), sent.tolist(), strict=True
                )
            ),
            *(
                Event(before, place, -1, batch=batch)
                for batch, (before, place) in enumerate(zip(gathered.tolist(), batches.tolist(), strict=True))
            ),
        ]
        return sorted(found, key=lambda event: (event.place, event.message < 0, event.message, event.batch))
