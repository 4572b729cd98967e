"""The pass that derives sends, receives and completion points: from a schedule to the steps that are carried out."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from evenpipe.schedule.actions import Action, Unit
from evenpipe.schedule.collector import without_cycle_collector
from evenpipe.schedule.kinds import COMPUTE, KINDS, RECEIVING, SENDING
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.topology import Link, Message, links, transfer

__all__ = ["Program", "Step", "lower"]

_OF_BATCH = frozenset(letter for letter, row in KINDS.items() if row.of_batch)
_LEAVING = frozenset(letter for letter in SENDING if KINDS[letter].held < 0)
#: Kinds that take a unit as a transfer has left it: they wait until that transfer is complete.
_AFTER_TRANSFER = frozenset(
    letter
    for letter, row in KINDS.items()
    if any(state == other.leaves for state in row.takes for other in KINDS.values() if other.letter in RECEIVING)
)


class Step(NamedTuple):
    """One action with the communication around it, in this order: post, complete, transfer, compute or update, send.

    ``post``: receives that compute needs, posted k compute actions ahead of their use, k being the group size.
    ``complete``: messages, received or sent by this stage, that must be complete before the action.
    ``transfer``: what an action starts to move to or from its partner or its host.
    ``send``: what compute gives a neighbour when it ends; local, where the next part of the model is on this stage.
    ``takes``: what compute got from a neighbour: one of ``complete``, or local.
    """

    post: tuple[Message, ...]
    complete: tuple[Message, ...]
    action: Action
    transfer: Message | None = None
    send: Message | None = None
    takes: Message | None = None


@dataclass(frozen=True)
class Program:
    """What engines and the simulator walk. ``drain``: per stage, what it sent and has not seen complete.

    ``pairs``: partner stages trade, in this program or in one of another size under the same settings.
    """

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]
    drain: tuple[tuple[Message, ...], ...]
    pairs: bool = False

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """What it, and programs of another size under the same settings, use of connections between stages."""
        return links(self.schedule.places, self.pairs)


@without_cycle_collector()
def lower(schedule: Schedule, pairs: bool = False) -> Program:
    """``schedule`` with its communication. :func:`evenpipe.schedule.build` does this, and has it verified."""
    lowered = [_lower_stage(schedule, stage) for stage in range(schedule.stages)]
    return Program(
        schedule,
        tuple(steps for steps, _ in lowered),
        tuple(drain for _, drain in lowered),
        pairs or any(schedule.evictions),
    )


def _lower_stage(schedule: Schedule, stage: int) -> tuple[tuple[Step, ...], tuple[Message, ...]]:
    stages, routes, row = schedule.stages, schedule.routes, schedule.actions[stage]
    # A group's inputs arrive while the group before it is computed (Ada-Grouper §4.4: the buffer queue). As many
    # results are under way per link, and one more: what was sent before them has arrived before the next is computed,
    # so that a stage keeps few results alive for its sends.
    ahead = schedule.group_size + 1
    inputs = [routes.incoming(action, stage) for action in row if action.kind in COMPUTE]
    due = schedule.residencies[stage].due
    leaving: deque[Message] = deque()
    moving: dict[tuple[Unit, int], Message] = {}  # by the unit and its evictor: own and accepted ones have like names
    sent: dict[Link, deque[Message]] = defaultdict(deque)
    steps = []
    posted = started = 0  # compute actions whose receives are posted; those that have started
    for action, waits in zip(row, due, strict=True):
        kind = action.kind
        if kind in _OF_BATCH:
            steps.append(Step((), (), action))
            continue
        post = tuple(message for message in inputs[posted : started + ahead] if message and not message.is_local)
        posted = started + ahead
        complete = [leaving.popleft() for _ in range(waits)]
        # What was loaded, accepted or swapped is there before the unit is used again.
        if moving and kind in _AFTER_TRANSFER and (action.unit, action.evictor) in moving:
            complete.append(moving.pop((action.unit, action.evictor)))
        if kind in COMPUTE:
            takes, send = inputs[started], routes.outgoing(action, stage)
            started += 1
            if takes is not None and not takes.is_local:
                complete.append(takes)
            if send is not None and not send.is_local:
                under_way = sent[send.link]
                under_way.append(send)
                if len(under_way) > ahead:
                    complete.append(under_way.popleft())
            steps.append(Step(post, tuple(complete), action, None, send, takes))
        else:
            moved = transfer(action, stage, stages)
            if kind in _LEAVING:
                leaving.append(moved)
            else:
                moving[action.unit, action.evictor] = moved
            steps.append(Step(post, tuple(complete), action, moved))
    return tuple(steps), (*leaving, *moving.values(), *(message for link in sent.values() for message in link))
