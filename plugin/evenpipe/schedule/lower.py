"""From a schedule to what its stages carry out: each action with the communication around it, proven free of deadlock.

1. Columns (:class:`.table.Table`). An action is known by its number, and a message by the number of its taker.
2. Wiring (:class:`.wiring.Wiring`). Who sends what an action takes, and what else must be complete before it: its
   unit's transfer, departures that make room, earlier results on the same link.
3. Clock (:func:`.order.walk`). All stages at once carry out what they can. That gives each action a place in one order
   of everything, or ends in a circle of waits, which is refused.
4. Order (:class:`.order.Order`). A message has one place for both of its ends, right after the action that makes it.
   A receive is posted before the taker's first action behind that place, a gathering of a batch likewise.
5. Proof, first part (:func:`check_order`, on columns): all that is awaited comes before what awaits it.
6. Steps (:func:`steps_of`, stage by stage, when first asked for): actions with their posts, waits, transfers and sends.
7. Proof, second part (:func:`check_steps`, before a step is carried out): a stage's steps are its part of that order,
   all of it, and in it.

So of all that is not done yet, what comes first in the order is what each of its stages is about to do, and can be
done: no stage waits for ever. At one place an action comes before messages, these, by the numbers that both their ends
have, before gatherings, and these go by their batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, islice, pairwise, repeat
from typing import Final, NamedTuple, TypeVar, overload

import numpy as np

from evenpipe.schedule.actions import Action
from evenpipe.schedule.fused import fusable
from evenpipe.schedule.order import Clock, Order, Queues
from evenpipe.schedule.schedule import DEFECT, Fault, Schedule, fault_of, marked
from evenpipe.schedule.table import Column
from evenpipe.schedule.topology import Gathering, Link, Message, links
from evenpipe.schedule.wiring import Wiring

__all__ = ["FusedBackward", "Lazy", "Program", "Step", "check_gatherings", "check_order", "lower", "steps_of"]

T = TypeVar("T")


class Step(NamedTuple):
    """One action with the communication around it, in this order: post, complete, transfer, compute or update, send.

    ``post``: receives of what compute needs here or later, each at its place in the one order of the whole pipeline
    (:mod:`evenpipe.schedule.order`), and gatherings. ``complete``: messages, received or sent by this stage, that must
    be complete before the action. ``transfer``: what an action starts to move to or from its partner or its host, once
    what it ``follows`` is complete: departures that make room for it, which nothing else waits for.
    ``then_post``: the same as ``post``, for what comes after the action and before ``send``.
    ``send``: what compute gives a neighbour when it ends; local, where the next part of the model is on this stage.
    ``takes``: what compute got from a neighbour: one of ``complete``, or local.
    ``fused``: the backward, the stage's next action, that is computed together with this forward, and what it takes.
    Its own step has only to send what that gave.
    """

    post: tuple[Message | Gathering, ...]
    complete: tuple[Message, ...]
    action: Action
    transfer: Message | None = None
    then_post: tuple[Message | Gathering, ...] = ()
    send: Message | None = None
    takes: Message | None = None
    follows: tuple[Message, ...] = ()
    fused: FusedBackward | None = None


class FusedBackward(NamedTuple):
    """A backward that is computed together with the forward before it, and what it got from a neighbour."""

    action: Action
    takes: Message | None


class Lazy(Sequence[T]):
    """A number of values, each made by ``make(number)`` when first asked for; equal to any sequence of equal values."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._numbers = range(count)
        self._make = cache(make)

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...

    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, slice):
            return [self[number] for number in self._numbers[at]]
        return self._make(self._numbers[at])

    def __len__(self) -> int:
        return len(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Program:
    """A schedule with its communication, for engines to walk.

    ``pairs``: partner stages trade, here or in another size under the same settings. ``queues``: what holds up what a
    stage is given, which its order goes by. ``clock``: what the order follows where times are known. ``fused``: a
    backward is computed together with the forward before it, where :func:`fusable` says so.
    """

    schedule: Schedule
    pairs: bool = False
    queues: Queues = "many"
    clock: Clock | None = None
    fused: bool = False

    @cached_property
    def wiring(self) -> Wiring:
        """Which action waits for which."""
        return Wiring(self.schedule)

    @cached_property
    def order(self) -> Order:
        """The places of a stage's ends of messages between its actions."""
        return Order(self.wiring, self.queues, self.clock)

    @cached_property
    def steps(self) -> Sequence[tuple[Step, ...]]:
        """Per stage, its actions with the communication around them."""
        return Lazy(self.schedule.stages, lambda stage: steps_of(self, stage, self.order.batches))

    @cached_property
    def drain(self) -> Sequence[tuple[Message, ...]]:
        """Per stage, the messages that it sent and has not seen complete."""
        return Lazy(self.schedule.stages, self._drain)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Connections between stages that it uses, or programs of another size under the same settings."""
        return links(self.schedule.places, self.pairs)

    def _drain(self, stage: int) -> tuple[Message, ...]:
        wiring = self.wiring
        departed = int(wiring.gone[self.schedule.table.of(stage)].max(initial=0))
        left = np.concatenate([wiring.leaving(stage)[0][departed:], wiring.left_over(stage)])
        return _present(wiring.messages(left))


def lower(schedule: Schedule, pairs: bool = False, queues: Queues = "many", fused: bool = False) -> Program:
    """``schedule`` with its communication. :func:`evenpipe.schedule.build` does this, and has it verified."""
    return Program(schedule, pairs or any(schedule.evictions), queues, fused=fused)


def steps_of(program: Program, stage: int, gatherings: Column) -> tuple[Step, ...]:
    """Return the steps of one stage, with the ``gatherings`` of batches that have these places in the order.

    Raises :class:`ScheduleError` unless they keep to that order (:func:`check_steps`).
    """
    wiring, rows = program.wiring, program.schedule.table.of(stage)
    post, then_post = _posts(program, stage, gatherings)
    computes, numbers = wiring.computes[rows], np.arange(rows.start, rows.stop)
    taken = np.where(computes & (wiring.link_of[rows] >= 0), numbers, -1)
    departing, *waits = wiring.waits(stage)
    departures = iter(_present(wiring.messages(wiring.leaving(stage)[0])))
    columns = (wiring.messages(column) for column in (*waits, taken, wiring.starts[rows]))
    fused = fusable(program.order, stage) if program.fused else frozenset()
    steps: list[Step] = []
    for number, action, departs, is_compute, transferred, received, settled, takes, starts in zip(
        numbers.tolist(), program.schedule.actions[stage], departing.tolist(), computes.tolist(), *columns, strict=True
    ):
        departed = tuple(islice(departures, departs))
        complete = _present((transferred, received, settled))
        posts, then_posts = tuple(post[number]), tuple(then_post[number])
        if is_compute:
            if number in fused:  # what it takes is complete by then, and is taken there
                taken_there = steps[-1]
                complete = tuple(message for message in complete if message != takes)
                given = () if takes is None or takes.is_local else (takes,)
                backward, takes = FusedBackward(action, takes), None
                steps[-1] = taken_there._replace(complete=(*taken_there.complete, *given), fused=backward)
            steps.append(Step(posts, (*departed, *complete), action, None, then_posts, starts, takes))
        else:
            steps.append(Step(posts, complete, action, starts, then_posts, follows=departed))
    check_steps(program.order, gatherings, stage, steps)
    return tuple(steps)


def _present(messages: Sequence[Message | None]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message is not None)


_Posts = defaultdict[int, list[Message | Gathering]]


def _posts(program: Program, stage: int, gatherings: Column) -> tuple[_Posts, _Posts]:
    """By action: what is posted before it, and what between it and the sending of its result."""
    post: _Posts = defaultdict(list)
    then_post: _Posts = defaultdict(list)
    events = program.order.events(stage, gatherings)
    messages = program.wiring.messages(np.array([event.message for event in events], np.int64))
    for event, message in zip(events, messages, strict=True):
        if event.sends:  # by the action that sends: what this gap has posted so far comes before the send
            then_post[event.next_action - 1] = post.pop(event.next_action, [])
        else:
            post[event.next_action].append(Gathering(event.batch) if message is None else message)
    return post, then_post


#: A place; 0 for an action, 1 for a message, 2 for a gathering; the number of the message or the batch.
_Key = tuple[int, int, int]

_NEVER: Final = np.iinfo(np.int64).max
_NOWHERE: Final[_Key] = (-1, 0, 0)  # no action's place is below 0


def check_order(order: Order) -> None:
    """All that is awaited comes before what awaits it. Raises :class:`Fault` with the first action that breaks this.

    At each place either one stage acts, and all that it takes has been met before; or two stages have the ends of one
    message, or of one transfer, which meet there; or all of them start to exchange what they know of a batch, which all
    have computed, and none has finished the step of.
    """
    wiring, places, messages = order.wiring, order.places, order.messages
    schedule, table = wiring.schedule, wiring.schedule.table
    actions = np.arange(len(places))
    first, last = table.first[table.stage] == actions, table.first[table.stage + 1] - 1 == actions
    before = np.where(first, -1, np.roll(places, 1))
    after = np.where(last, _NEVER, np.roll(places, -1))
    taking = np.flatnonzero(messages >= 0)
    senders, posted = wiring.senders[taking], order.posted[taking]
    message = messages[taking]
    settled = np.flatnonzero(wiring.settles >= 0)
    partners = np.flatnonzero(table.which(lambda row: row.receives and not row.sends))
    no_place = "has no place in one order of all stages"
    faults = (
        (actions, places <= before),
        (taking, (before[posted] > message) | (message >= places[posted]) | (message >= places[taking])),
        (senders, (places[senders] > message) | (message >= after[senders])),
        (settled, messages[wiring.gives[wiring.settles[settled]]] >= places[settled]),
        (partners, places[partners] != places[wiring.senders[partners]]),
    )
    _refuse_first(schedule, [(numbers, wrong, no_place) for numbers, wrong in faults])
    if schedule.weight_versions > 1 and table.of_batch.any():
        check_gatherings(order, order.batches, schedule.micro_batches)


def check_gatherings(order: Order, gatherings: Column, micro_batches: int) -> None:
    """These places of gatherings, one for every so many ``micro_batches``, are in order, each after all stages' compute
    of its batch, and before their updates by it. Raises :class:`Fault`.
    """
    schedule, table, places = order.wiring.schedule, order.wiring.schedule.table, order.places
    gathered = np.full(schedule.micro_batches * schedule.batches // micro_batches, -1, np.int64)
    gathered[: len(gatherings)] = gatherings
    early = np.diff(gathered, prepend=-1) < 0
    finishing, updates = np.flatnonzero(table.finishing), np.flatnonzero(table.of_batch)
    batch, updated = table.micro_batch[finishing] // micro_batches, table.micro_batch[updates]
    late = (places[finishing] > gathered[batch]) | early[batch]
    faults = [
        (finishing, late, "comes after what is gathered of its batch"),
        (updates, places[updates] <= gathered[updated], "comes before what is gathered of its batch"),
    ]
    _refuse_first(schedule, faults)


def _refuse_first(schedule: Schedule, faults: Sequence[tuple[Column, Column, str]]) -> None:
    """Raise a fault of the first action in ``faults``: numbers of actions, which of them are wrong, and how."""
    for numbers, wrong, reason in faults:
        for action in numbers[wrong].tolist()[:1]:
            raise fault_of(schedule, action, f"{reason}: {DEFECT}")


def check_steps(order: Order, gatherings: Column, stage: int, steps: Sequence[Step]) -> None:
    """The ``steps`` of a stage, with ``gatherings`` of these places, are its part of the order: all that it takes part
    in, each once, in that order; and it completes only what it has begun. Raises :class:`ScheduleError`.
    """
    schedule = order.wiring.schedule
    row, own = schedule.actions[stage], order.places[schedule.table.of(stage)].tolist()
    missing, begun = _part_of(order, gatherings, stage), set[object]()
    met = dict(missing)
    latest = _NOWHERE
    with marked(schedule):
        for at, step in enumerate(steps):
            begun.update(step.post)
            completes = begun.issuperset(step.complete) and begun.issuperset(step.follows)
            if (backward := step.fused) is not None:  # what both take is there before either begins
                follows = backward.action == row[at + 1] and met.get(backward.takes, _NOWHERE) < (own[at], 0, 0)
                completes = completes and follows
            sent = () if step.send is None or step.send.is_local else (step.send,)
            keys = [missing.pop(item, _NOWHERE) for item in step.post]
            keys.append((own[at], 0, 0) if step.transfer is None else missing.pop(step.transfer, _NOWHERE))
            keys += [missing.pop(item, _NOWHERE) for item in (*step.then_post, *sent)]
            begun.update((step.transfer, *step.then_post, *sent))
            if not completes or step.action != row[at]:
                wrong = "waits for what is not under way" if not completes else f"is carried out as {step.action}"
                raise Fault(f"{row[at]} {wrong}: {DEFECT}", stage, at)
            for early, late in pairwise((latest, *keys)):
                if early >= late:
                    part = ("compute", "message", "gathering")[late[1]]
                    where = f"has another place in the one order: tick {late[0]} comes after tick {early[0]}"
                    raise Fault(f"a {part} in the step of {row[at]} {where}: {DEFECT}", stage, at)
            latest = keys[-1]
        if missing or len(steps) != len(row):
            raise Fault(f"{row[-1]} ends what lacks a part of the one order: {DEFECT}", stage, len(row) - 1)


def _part_of(order: Order, gatherings: Column, stage: int) -> dict[Message | Gathering | None, _Key]:
    """Return the place of all that a stage takes part in beside its actions: the same at both ends of a message."""
    wiring, rows = order.wiring, order.wiring.schedule.table.of(stage)
    moved, computes = wiring.moves[rows], wiring.computes[rows]
    received = rows.start + np.flatnonzero(order.messages[rows] >= 0)
    ends = np.concatenate([received, moved[computes & (moved >= 0)]])
    transferring = ~computes & (moved >= 0)
    keys = chain(
        zip(order.messages[ends].tolist(), repeat(1), ends.tolist()),
        ((place, 0, 0) for place in order.places[rows][transferring].tolist()),
    )
    last = order.places[rows][-1:].max(initial=0)  # a stretch of a stream ends before it gathers its last batches
    gathered = (
        (Gathering(batch), (place, 2, batch)) for batch, place in enumerate(gatherings.tolist()) if place < last
    )
    named = wiring.messages(np.concatenate([ends, moved[transferring]]))
    return dict(chain(zip(named, keys, strict=True), gathered))
