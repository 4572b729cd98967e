"""The pass that derives sends, receives and completion points: from a schedule to the steps that are carried out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from evenpipe.schedule.clock import Clock
from evenpipe.schedule.kinds import COMPUTE, KINDS
from evenpipe.schedule.lazy import PerStage
from evenpipe.schedule.one_order import check_steps
from evenpipe.schedule.order import Order, Queues
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.step import Step
from evenpipe.schedule.table import Column
from evenpipe.schedule.topology import Gathering, Link, Message, links, transfer
from evenpipe.schedule.wiring import Wiring

__all__ = ["Program", "lower", "steps_of"]


@dataclass(frozen=True)
class Program:
    """What engines walk. ``pairs``: partner stages trade, here or in another size under the same settings.

    ``queues``: what holds up what a stage is given, which its order goes by. ``clock``: what the order follows where
    times are known.
    """

    schedule: Schedule
    pairs: bool = False
    queues: Queues = "many"
    clock: Clock | None = None

    @cached_property
    def wiring(self) -> Wiring:
        """Which action waits for which."""
        return Wiring(self.schedule)

    @cached_property
    def order(self) -> Order:
        """Where between a stage's actions its ends of messages are."""
        return Order(self.wiring, self.queues, self.clock)

    @cached_property
    def steps(self) -> Sequence[tuple[Step, ...]]:
        """Per stage, its actions with the communication around them."""
        return PerStage(self.schedule.stages, lambda stage: steps_of(self, stage, self.order.batches))

    @cached_property
    def drain(self) -> Sequence[tuple[Message, ...]]:
        """Per stage, what it sent and has not seen complete."""
        return PerStage(self.schedule.stages, partial(_drain, self.wiring))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """What it, and programs of another size under the same settings, use of connections between stages."""
        return links(self.schedule.places, self.pairs)


def lower(schedule: Schedule, pairs: bool = False, queues: Queues = "many") -> Program:
    """``schedule`` with its communication. :func:`evenpipe.schedule.build` does this, and has it verified."""
    return Program(schedule, pairs or any(schedule.evictions), queues)


def steps_of(program: Program, stage: int, gatherings: Column) -> tuple[Step, ...]:
    """The steps of one stage, with the ``gatherings`` of batches that have these places in the order.

    They are proven to keep to that order (:func:`evenpipe.schedule.one_order.check_steps`).
    """
    schedule, wiring = program.schedule, program.wiring
    row, routes, rows = schedule.actions[stage], schedule.routes, schedule.table.of(stage)
    departures = wiring.departures(stage).tolist()
    after, settles, gone = (column[rows].tolist() for column in (wiring.after, wiring.settles, wiring.gone))
    post, then_post = _posts(program, stage, gatherings)
    steps = []
    for at, action in enumerate(row):
        number = rows.start + at
        gone_by_now = departures[gone[at - 1] if at else 0 : gone[at]]
        departed = tuple(_started(wiring, stage, one) for one in gone_by_now)
        complete = [_started(wiring, stage, after[at])] if after[at] >= 0 else []
        posts, then_posts = tuple(post[number]), tuple(then_post[number])
        if action.kind not in COMPUTE:
            moved = None if KINDS[action.kind].of_batch else transfer(action, stage, schedule.stages)
            steps.append(Step(posts, tuple(complete), action, moved, then_posts, follows=departed))
            continue
        complete = [*departed, *complete]
        takes = routes.incoming(action, stage)
        if takes is not None and not takes.is_local:
            complete.append(takes)
        if settles[at] >= 0:
            complete.append(_started(wiring, stage, settles[at]))
        send = routes.outgoing(action, stage)
        steps.append(Step(posts, tuple(complete), action, None, then_posts, send, takes))
    check_steps(program.order, gatherings, stage, steps)
    return tuple(steps)


_Posts = defaultdict[int, list[Message | Gathering]]


def _posts(program: Program, stage: int, gatherings: Column) -> tuple[_Posts, _Posts]:
    """By action: what is posted before it, and what between it and the sending of its result."""
    schedule = program.schedule
    row, rows = schedule.actions[stage], schedule.table.of(stage)
    post: _Posts = defaultdict(list)
    then_post: _Posts = defaultdict(list)
    for event in program.order.events(stage, gatherings):
        if event.sends:  # what has been found of this gap comes before the send
            then_post[event.before - 1] = post.pop(event.before, [])
        elif event.message < 0:
            post[event.before].append(Gathering(event.batch))
        else:
            message = schedule.routes.incoming(row[event.message - rows.start], stage)
            assert message is not None, "what is received is of compute that takes something"
            post[event.before].append(message)
    return post, then_post


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
