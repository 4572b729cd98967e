"""The pass that derives sends, receives and completion points: from a schedule to the steps that are carried out."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

from evenpipe.schedule.actions import ACCEPT, BACKWARD, COMPUTE, DEPARTING, EVICT, LOAD, RETURN, UPDATE, Action, Unit
from evenpipe.schedule.collector import without_cycle_collector
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.topology import Link, Message, incoming, outgoing, partner

__all__ = ["Program", "Step", "lower", "transfer"]


class Step(NamedTuple):
    """One action with the communication around it, in this order: post, complete, transfer, compute or update, send.

    ``post``: receives that compute needs, posted k compute actions ahead of their use, k being the group size.
    ``complete``: messages, received or sent by this stage, that must be complete before the action.
    ``transfer``: what an E or R sends, or an L or A receives, from here on.
    ``send``: what an F or B sends when it ends.
    """

    post: tuple[Message, ...]
    complete: tuple[Message, ...]
    action: Action
    transfer: Message | None
    send: Message | None


@dataclass(frozen=True)
class Program:
    """What the executor and the simulator walk. ``drain``: per stage, what it sent and has not seen complete."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]
    drain: tuple[tuple[Message, ...], ...]


@without_cycle_collector()
def lower(schedule: Schedule) -> Program:
    """``schedule`` with its communication. The schedule must have passed :func:`evenpipe.schedule.verify`."""
    lowered = [_lower_stage(schedule, stage) for stage in range(schedule.stages)]
    return Program(schedule, tuple(steps for steps, _ in lowered), tuple(drain for _, drain in lowered))


def transfer(action: Action, stage: int, stages: int) -> Message:
    """What an E, L, A or R on ``stage`` moves between the two partners."""
    kind, micro_batch, chunk, evictor = action
    other = partner(stage, stages) if kind in (EVICT, LOAD) else evictor
    source, target = (stage, other) if kind in DEPARTING else (other, stage)
    return Message(Link("evict" if kind in (EVICT, ACCEPT) else "load", source, target), micro_batch, chunk)


def _lower_stage(schedule: Schedule, stage: int) -> tuple[tuple[Step, ...], tuple[Message, ...]]:
    stages, chunks, row = schedule.stages, schedule.chunks, schedule.actions[stage]
    # A group's inputs arrive while the group before it is computed (Ada-Grouper §4.4: the buffer queue). As many
    # results are under way per link, and one more: what was sent before them has arrived before the next is computed,
    # so that a stage keeps few results alive for its sends.
    ahead = schedule.group_size + 1
    inputs = [incoming(action, stage, stages, chunks) for action in row if action.kind in COMPUTE]
    due = schedule.residencies[stage].due
    leaving: deque[Message] = deque()
    arriving: dict[tuple[Unit, int], Message] = {}  # by the unit and its evictor: own and accepted ones have like names
    sent: dict[Link, deque[Message]] = defaultdict(deque)
    steps = []
    posted = started = 0  # compute actions whose receives are posted; those that have started
    for action, waits in zip(row, due, strict=True):
        if action.kind == UPDATE:
            steps.append(Step((), (), action, None, None))
            continue
        post = [message for message in inputs[posted : started + ahead] if message is not None]
        posted = started + ahead
        complete = [leaving.popleft() for _ in range(waits)]
        # A backward needs what was loaded for it, a return what was accepted before.
        if arriving and action.kind in (BACKWARD, RETURN) and (action.unit, action.evictor) in arriving:
            complete.append(arriving.pop((action.unit, action.evictor)))
        if action.kind in COMPUTE:
            needed = inputs[started]
            if needed is not None:
                complete.append(needed)
            started += 1
            moved, send = None, outgoing(action, stage, stages, chunks)
            if send is not None:
                under_way = sent[send.link]
                under_way.append(send)
                if len(under_way) > ahead:
                    complete.append(under_way.popleft())
        else:
            moved, send = transfer(action, stage, stages), None
            if action.kind in DEPARTING:
                leaving.append(moved)
            else:
                arriving[action.unit, action.evictor] = moved
        steps.append(Step(tuple(post), tuple(complete), action, moved, send))
    return tuple(steps), (*leaving, *(message for link in sent.values() for message in link))
