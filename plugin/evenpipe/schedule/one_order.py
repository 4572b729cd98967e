"""The proof that all stages are given their parts of one order of everything, so that none waits for ever.

The order (:mod:`evenpipe.schedule.order`) goes by places; at one place an action comes before messages, these, by the
numbers that both their ends have, before gatherings, and these go by their batches. It is proven in two parts. Of the
order, on columns: all that an action, a message, a gathering or an update awaits comes before it. Of each stage's
steps, when they are made, before any is carried out: they are its part of that order, all of it, and in it. So of all
that has not been done yet, what comes first in the order is what each of its stages is about to do, and can be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise, repeat
from typing import Final

import numpy as np

from evenpipe.schedule.faults import Fault, fault_of, marked
from evenpipe.schedule.kinds import FINISHING, OWN_ENDS
from evenpipe.schedule.order import Order
from evenpipe.schedule.step import Step
from evenpipe.schedule.table import Column, by_kind
from evenpipe.schedule.topology import Gathering, Message

__all__ = ["check_gatherings", "check_order", "check_steps"]

#: A place; 0 for an action, 1 for a message, 2 for a gathering; the number of the message or the batch.
_Key = tuple[int, int, int]

_NEVER: Final = np.iinfo(np.int64).max
_NOWHERE: Final[_Key] = (-1, 0, 0)  # no action's place is below 0
_FINISHING = by_kind(lambda row: row.letter in FINISHING)
_OF_BATCH = by_kind(lambda row: row.of_batch)
_TAKES_FROM_PARTNER = by_kind(lambda row: row.receives and row.letter not in OWN_ENDS)
_DEFECT: Final = "this is a defect of evenpipe"


def check_order(order: Order) -> None:
    """All that is awaited comes before what awaits it. Raises :class:`Fault` with the first action that breaks this.

    At each place either one stage acts, and all that it takes has been met before; or two stages have the ends of one
    message, or of one transfer, which meet there; or all of them start to exchange what they know of a batch, which all
    have computed, and none has finished the step of.
    """
    wiring, places, messages = order.wiring, order.places, order.messages
    schedule, table = wiring.schedule, wiring.schedule.table
    if order.stuck is not None:
        raise fault_of(schedule, order.stuck, "waits for ever: the stages wait for one another in a circle")
    actions = np.arange(len(places))
    first, last = table.first[table.stage] == actions, table.first[table.stage + 1] - 1 == actions
    before = np.where(first, -1, np.roll(places, 1))
    after = np.where(last, _NEVER, np.roll(places, -1))
    taking = np.flatnonzero(messages >= 0)
    senders, posted = wiring.senders[taking], order.posted[taking]
    message = messages[taking]
    settled = np.flatnonzero(wiring.settles >= 0)
    partners = np.flatnonzero(_TAKES_FROM_PARTNER[table.kind])
    faults = (
        (actions, places <= before),
        (taking, (before[posted] > message) | (message >= places[posted]) | (message >= places[taking])),
        (senders, (places[senders] > message) | (message >= after[senders])),
        (settled, messages[wiring.gives[wiring.settles[settled]]] >= places[settled]),
        (partners, places[partners] != places[wiring.senders[partners]]),
    )
    for those, wrong in faults:
        for action in those[wrong].tolist()[:1]:
            raise fault_of(schedule, action, f"has no place in one order of all stages: {_DEFECT}")
    if _OF_BATCH[table.kind].any():
        check_gatherings(order, order.batches, schedule.micro_batches)


def check_gatherings(order: Order, gatherings: Column, micro_batches: int) -> None:
    """These places of gatherings, one for every so many ``micro_batches``, are in order, each after all stages' compute
    of its batch, and before their updates by it. Raises :class:`Fault`.
    """
    schedule, table, places = order.wiring.schedule, order.wiring.schedule.table, order.places
    gathered = np.full(schedule.micro_batches * schedule.batches // micro_batches, -1, np.int64)
    gathered[: len(gatherings)] = gatherings
    early = np.diff(gathered, prepend=-1) < 0
    finishing, updates = np.flatnonzero(_FINISHING[table.kind]), np.flatnonzero(_OF_BATCH[table.kind])
    batch, updated = table.micro_batch[finishing] // micro_batches, table.micro_batch[updates]
    faults = (
        (finishing, (places[finishing] > gathered[batch]) | early[batch], "comes after what is gathered of its batch"),
        (updates, places[updates] <= gathered[updated], "comes before what is gathered of its batch"),
    )
    for those, wrong, reason in faults:
        for action in those[wrong].tolist()[:1]:
            raise fault_of(schedule, action, f"{reason}: {_DEFECT}")


def check_steps(order: Order, gatherings: Column, stage: int, steps: Sequence[Step]) -> None:
    """The ``steps`` of a stage, with ``gatherings`` of these places, are its part of the order: all that it takes part
    in, each once, in that order; and it completes only what it has begun. Raises :class:`ScheduleError`.
    """
    schedule = order.wiring.schedule
    row, own = schedule.actions[stage], order.places[schedule.table.of(stage)].tolist()
    owed, begun = _owed(order, gatherings, stage), set[object]()
    latest = _NOWHERE
    with marked(schedule):
        for at, step in enumerate(steps):
            begun.update(step.post)
            completes = begun.issuperset(step.complete) and begun.issuperset(step.follows)
            sent = () if step.send is None or step.send.is_local else (step.send,)
            keys = [owed.pop(item, _NOWHERE) for item in step.post]
            keys.append((own[at], 0, 0) if step.transfer is None else owed.pop(step.transfer, _NOWHERE))
            keys += [owed.pop(item, _NOWHERE) for item in (*step.then_post, *sent)]
            begun.update((step.transfer, *step.then_post, *sent))
            in_order = all(early < late for early, late in pairwise((latest, *keys)))
            if not (completes and in_order and step.action == row[at]):
                raise Fault(f"{row[at]} is given beside what has another place in the one order: {_DEFECT}", stage, at)
            latest = keys[-1]
        if owed or len(steps) != len(row):
            raise Fault(f"{row[-1]} ends what lacks a part of the one order: {_DEFECT}", stage, len(row) - 1)


def _owed(order: Order, gatherings: Column, stage: int) -> dict[Message | Gathering, _Key]:
    """What a stage takes part in beside its actions, and where in the order. Both ends of a message find the same."""
    wiring, table = order.wiring, order.wiring.schedule.table
    rows = table.of(stage)
    actions = np.arange(rows.start, rows.stop)
    moved, computes = wiring.moves[rows], wiring.computes[rows]
    received, sent = actions[order.messages[rows] >= 0], moved[computes & (moved >= 0)]
    transferring = ~computes & (moved >= 0)
    ends, transfers = np.concatenate([received, sent]), moved[transferring]
    numbers = np.concatenate([ends, transfers])
    columns = (wiring.link_of, table.micro_batch, table.chunk)
    named = (
        Message(wiring.links[link], *unit) for link, *unit in zip(*(c[numbers].tolist() for c in columns), strict=True)
    )
    keys = chain(
        zip(order.messages[ends].tolist(), repeat(1), ends.tolist()),
        ((place, 0, 0) for place in order.places[rows][transferring].tolist()),
    )
    last = order.places[rows][-1:].max(initial=0)  # a stretch of a stream ends before it gathers its last batches
    gathered = (
        (Gathering(batch), (place, 2, batch)) for batch, place in enumerate(gatherings.tolist()) if place < last
    )
    return dict(chain(zip(named, keys, strict=True), gathered))
