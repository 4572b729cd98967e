"""The pass that derives sends, receives and completion points: from a schedule to the steps that are carried out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from evenpipe.schedule.actions import ACCEPT, ARRIVING, BACKWARD, COMPUTE, EVICT, LOAD, RETURN, Action
from evenpipe.schedule.residency import residency
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.topology import Link, Message, incoming, outgoing, partner

__all__ = ["Program", "Step", "lower", "transfer"]

#: Forwards' and backwards' results under way per link: what was sent before that has arrived before the next is
#: computed, so that a stage keeps at most so many results alive for its sends.
SENDS_IN_FLIGHT = 2


class Step(NamedTuple):
    """One action with the communication around it, in this order: post, complete, action, send.

    ``post``: receives to post before the action, at least one compute action ahead of their use.
    ``complete``: messages, received or sent by this stage, that must be complete before the action.
    ``send``: F and B send when they end, E and R when they start.
    """

    post: tuple[Message, ...]
    complete: tuple[Message, ...]
    action: Action
    send: Message | None


@dataclass(frozen=True)
class Program:
    """What the executor and the simulator walk. ``drain``: per stage, what it sent and has not seen complete."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]
    drain: tuple[tuple[Message, ...], ...]


def lower(schedule: Schedule) -> Program:
    """``schedule`` with its communication. The schedule must have passed :func:`evenpipe.schedule.verify`."""
    lowered = [_lower_stage(schedule, stage) for stage in range(schedule.stages)]
    return Program(schedule, tuple(steps for steps, _ in lowered), tuple(drain for _, drain in lowered))


def transfer(action: Action, stage: int, stages: int) -> Message:
    """What an E, L, A or R on ``stage`` moves between the two partners."""
    kind, micro_batch, chunk, evictor = action
    other = partner(stage, stages) if kind in (EVICT, LOAD) else evictor
    link = {
        EVICT: Link("evict", stage, other),
        ACCEPT: Link("evict", other, stage),
        LOAD: Link("load", other, stage),
        RETURN: Link("load", stage, other),
    }[kind]
    return Message(link, micro_batch, chunk)


def _lower_stage(schedule: Schedule, stage: int) -> tuple[tuple[Step, ...], tuple[Message, ...]]:
    stages, chunks, row = schedule.stages, schedule.chunks, schedule.actions[stage]
    inputs = deque(incoming(action, stage, stages, chunks) for action in row if action.kind in COMPUTE)
    due = residency(row, schedule.bound).due
    leaving: deque[Message] = deque()
    arriving: set[Message] = set()
    sent: dict[Link, deque[Message]] = defaultdict(deque)
    steps = []
    ahead = 2  # how many compute actions' receives may be posted now: the next one's and that of the one after it
    for action, waits in zip(row, due, strict=True):
        post = [inputs.popleft() for _ in range(min(ahead, len(inputs)))]
        ahead = 0
        complete: list[Message | None] = [leaving.popleft() for _ in range(waits)]
        if action.kind in COMPUTE:
            ahead = 1
            complete.append(incoming(action, stage, stages, chunks))
            send = outgoing(action, stage, stages, chunks)
            if send is not None:
                sent[send.link].append(send)
                if len(sent[send.link]) > SENDS_IN_FLIGHT:
                    complete.append(sent[send.link].popleft())
            source = transfer(Action(LOAD, *action.unit), stage, stages) if action.kind == BACKWARD else None
        else:
            message = transfer(action, stage, stages)
            send = None if action.kind in ARRIVING else message
            (leaving.append if send else arriving.add)(message)
            post += [] if send else [message]
            source = transfer(action._replace(kind=ACCEPT), stage, stages) if action.kind == RETURN else None
        # A backward needs what was loaded for it, a return what was accepted before.
        if source in arriving:
            arriving.discard(source)
            complete.append(source)
        steps.append(Step(_present(post), _present(complete), action, send))
    return tuple(steps), (*leaving, *(message for link in sent.values() for message in link))


def _present(messages: Iterable[Message | None]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message is not None)
