"""The pass that derives sends, receives and completion points: from a schedule to the steps that are carried out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

from evenpipe.schedule.actions import Action
from evenpipe.schedule.kinds import COMPUTE, KINDS
from evenpipe.schedule.lazy import PerStage
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.topology import Link, Message, links, transfer
from evenpipe.schedule.wiring import Wiring

__all__ = ["Program", "Step", "lower"]


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
    """What engines walk. ``drain``: per stage, what it sent and has not seen complete.

    ``pairs``: partner stages trade, in this program or in one of another size under the same settings.
    ``wiring``: what ``steps`` and ``drain`` are made from, and the simulator walks; the schedule's own if left out.
    """

    schedule: Schedule
    steps: Sequence[tuple[Step, ...]]
    drain: Sequence[tuple[Message, ...]]
    pairs: bool = False
    wiring: Wiring = field(default=None, compare=False, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.wiring is None:
            object.__setattr__(self, "wiring", Wiring(self.schedule))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """What it, and programs of another size under the same settings, use of connections between stages."""
        return links(self.schedule.places, self.pairs)


def lower(schedule: Schedule, pairs: bool = False) -> Program:
    """``schedule`` with its communication. :func:`evenpipe.schedule.build` does this, and has it verified."""
    wiring = Wiring(schedule)
    steps = PerStage(schedule.stages, partial(_steps, wiring))
    drain = PerStage(schedule.stages, partial(_drain, wiring))
    return Program(schedule, steps, drain, pairs or any(schedule.evictions), wiring)


def _steps(wiring: Wiring, stage: int) -> tuple[Step, ...]:
    schedule = wiring.schedule
    row, routes, rows = schedule.actions[stage], schedule.routes, schedule.table.of(stage)
    departures = wiring.departures(stage).tolist()
    after, settles, gone = (column[rows].tolist() for column in (wiring.after, wiring.settles, wiring.gone))
    posts: dict[int, list[Message]] = defaultdict(list)
    for action, posted in zip(row, wiring.posted[rows].tolist(), strict=True):
        if posted >= 0 and (message := routes.incoming(action, stage)) is not None:
            posts[posted].append(message)
    steps = []
    for at, action in enumerate(row):
        before = departures[gone[at - 1] if at else 0 : gone[at]] + [after[at]] * (after[at] >= 0)
        complete = [_started(wiring, stage, number) for number in before]
        if action.kind not in COMPUTE:
            moved = None if KINDS[action.kind].of_batch else transfer(action, stage, schedule.stages)
            steps.append(Step(tuple(posts[rows.start + at]), tuple(complete), action, moved))
            continue
        takes = routes.incoming(action, stage)
        if takes is not None and not takes.is_local:
            complete.append(takes)
        if settles[at] >= 0:
            complete.append(_started(wiring, stage, settles[at]))
        send = routes.outgoing(action, stage)
        steps.append(Step(tuple(posts[rows.start + at]), tuple(complete), action, None, send, takes))
    return tuple(steps)


def _drain(wiring: Wiring, stage: int) -> tuple[Message, ...]:
    complete = int(wiring.gone[wiring.schedule.table.of(stage)].max(initial=0))
    left = wiring.departures(stage).tolist()[complete:] + wiring.left_over(stage)
    return tuple(_started(wiring, stage, number) for number in left)


def _started(wiring: Wiring, stage: int, number: int) -> Message:
    """What an action of the stage starts to move: to its partner or its host, or, when it has computed, on."""
    schedule = wiring.schedule
    action = schedule.actions[stage][number - schedule.table.of(stage).start]
    result = schedule.routes.outgoing(action, stage) if action.kind in COMPUTE else None
    return result or transfer(action, stage, schedule.stages)
