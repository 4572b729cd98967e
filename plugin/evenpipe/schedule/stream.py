"""One stage's steps in a stream of batches without an end, cut into one call a batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import takewhile
from operator import ne

import numpy as np

from evenpipe.schedule.actions import (
    BACKWARD,
    COMPUTE,
    FINISHING,
    FORWARD,
    SWAP_OUT,
    UPDATE,
    Action,
    ScheduleError,
)
from evenpipe.schedule.build import build
from evenpipe.schedule.lower import PerStage, Program, Step, check_gatherings, steps_of
from evenpipe.schedule.order import Queues
from evenpipe.schedule.schedule import fault_of, marked
from evenpipe.schedule.spec import Size, Spec, alternate, units
from evenpipe.schedule.table import Column, by_kind, following
from evenpipe.schedule.topology import Gathering, Message, partner

__all__ = ["Stream"]

_DEFECT = "this is a defect of evenpipe: report it, and run without bpipe"
_FINISHING = by_kind(lambda row: row.letter in FINISHING)


class Stream:
    """What a schedule without flushes does on so many stages, for ever: that of any number of batches begins so.

    Past its warm-up a stage repeats itself: what it posts every p micro-batches, after which a micro-batch is back, and
    what it trades every p − 2 − s, of which s is the pair's evictor. So the verified program of a stretch that is long
    enough says what comes after it too. ``swaps``: the positions of the model's parts that swap tensors to their hosts.
    Raises ScheduleError where :func:`build` does.

    No stage waits for ever (:mod:`evenpipe.schedule.lower`). Proven for all stages at once, before anything runs:
    the stretch has one order, with its gatherings, as if each micro-batch were the last of a batch; and past the
    warm-up the places of all in it repeat, each stage's by its own period, all at one pace, over twice the longest
    period. Two stages that give a message, a transfer or a gathering the same places for as long as both their periods
    together do so for ever, and each stage's part of the order goes on as it repeats. Proven of a stage's steps when it
    is first asked for any: they are its part of the order, over all of the stretch, and repeat. Of each call: its
    update comes after what is gathered of the batch. What is ``owed`` after a call is not part of this proof.
    """

    def __init__(
        self,
        spec: Spec,
        stages: int,
        micro_batches: int,
        bpipe: bool = False,
        queues: Queues = "many",
        swaps: Collection[int] = (),
    ) -> None:
        if spec.update_follows is None:
            raise ScheduleError(f"schedule={spec.name}: flushes, or ends with its last batch: choose 2bw")
        self._size = spec.fitted(Size(stages, micro_batches))
        self._update_follows = spec.update_follows
        self._name = spec.name
        self.stages = stages
        self.micro_batches = micro_batches
        self._bpipe = bpipe
        self._first = 2 * stages  # a forward in the steady state of every stage
        self._last = self._first + 2 * max(self._period(stage) for stage in range(stages))
        stretch = self._last + stages + 4
        # One long batch has the compute order of many short ones.
        flushing = replace(spec, update_follows=None)
        self.program: Program = build(flushing, Size(stages, stretch), bpipe, queues, swaps)
        for stage in range(stages):
            self._check_order(stage)
        self._gatherings = _gatherings(self.program)
        with marked(self.program.schedule):
            check_gatherings(self.program.order, self._gatherings, 1)
            self._check_places()
        self._cells = PerStage(stages, self._checked_cells)

    def call(self, stage: int, batch: int, update_early: bool = False) -> list[Step]:
        """The steps after the last backward of the batch before ``batch`` (from 0), up to and with that of ``batch``.

        Forwards reach into the batch after. The update of the batch before is finished where ``Spec.update_follows``
        says, or, with ``update_early``, before the first backward: for a stage that need not wait for others to update.
        """
        ahead = self.stages - 1 - stage
        first, last = batch * self.micro_batches, (batch + 1) * self.micro_batches - 1
        steps = [self._of_batches(step) for step in self._between(stage, first - 1, last)]
        if batch == 0:
            return steps
        after = first + ahead if update_early else self._update_follows(self._size, batch - 1)
        at = next(index for index, step in enumerate(steps) if step.action[:2] == (FORWARD, after)) + 1
        # The update needs what is gathered, and may come right after that.
        posts, gathering = steps[at].post, Gathering(batch - 1)
        before = posts.index(gathering) + 1 if gathering in posts else 0
        steps[at] = steps[at]._replace(post=posts[before:])
        at += steps[at].action.kind == SWAP_OUT  # which belongs to the forward
        steps.insert(at, Step(posts[:before], (), Action(UPDATE, batch - 1)))
        waits = stage == 0 or not update_early
        if waits and not any(gathering in (*step.post, *step.then_post) for step in steps[: at + 1]):
            raise ScheduleError(
                f"schedule={self._name}: stage {stage} would wait for ever to finish the step of batch {batch - 1}: "
                "it comes before it is gathered what all stages know of that batch: choose 2bw"
            )
        return steps

    def _of_batches(self, step: Step) -> Step:
        """``step`` with the gatherings of batches in place of those of micro-batches."""
        if not any(isinstance(item, Gathering) for item in (*step.post, *step.then_post)):
            return step
        return step._replace(post=self._gathered(step.post), then_post=self._gathered(step.then_post))

    def _gathered(self, items: Sequence[Message | Gathering]) -> tuple[Message | Gathering, ...]:
        kept = (item for item in items if isinstance(item, Message) or (item.batch + 1) % self.micro_batches == 0)
        return tuple(
            item if isinstance(item, Message) else Gathering(item.batch // self.micro_batches) for item in kept
        )

    def owed(self, stage: int, batch: int) -> list[Step]:
        """What ``stage`` has to take part in if the stream is broken off after the call of ``batch``: what neighbours
        have sent it by then, and transfers that its partner has started, that it has not come to; in order.

        So every message then has both its ends.
        """
        cut, around = (batch + 1) * self.micro_batches - 1, 2 * self.stages
        others = {stage - 1, stage + 1, partner(stage, self.stages)} - {stage, -1, self.stages}
        theirs = [step for other in others for step in self._between(other, max(-1, cut - around), cut)]
        begun = {message for step in theirs for message in (step.transfer, step.send)} - {None}
        owed = (
            step._replace(
                post=tuple(item for item in (*step.post, *step.then_post) if item in begun),
                transfer=step.transfer if step.transfer in begun else None,
                then_post=(),
                send=None,
                takes=None,
            )
            for step in self._between(stage, cut, cut + around)
        )
        return [step for step in owed if step.post or step.transfer is not None]

    def _between(self, stage: int, after: int, last: int) -> Iterator[Step]:
        """The steps after the backward of micro-batch ``after`` (-1: from the start), to that of ``last``, included."""
        ahead = self.stages - 1 - stage
        for forward in range(after + ahead if after >= 0 else 0, last + ahead + 1):
            cell: Sequence[Step] = self._cell(stage, forward)
            if after >= 0 and forward == after + ahead:
                cell = cell[_backward(cell, after) + 1 :]
            if forward == last + ahead:
                cell = cell[: _backward(cell, last) + 1]
            yield from cell

    def _cell(self, stage: int, forward: int) -> Sequence[Step]:
        """The steps from the forward of that micro-batch to before the next forward."""
        beyond = forward - (self._first + self._period(stage))
        if beyond < 0:
            return self._cells[stage][forward]
        repeats = self._first + beyond % self._period(stage)
        return _shifted(self._cells[stage][repeats], forward - repeats)

    def _period(self, stage: int) -> int:
        evictor = min(stage, partner(stage, self.stages))
        return math.lcm(self.stages, max(1, self.stages - 2 - evictor)) if self._bpipe else self.stages

    def _checked_cells(self, stage: int) -> list[list[Step]]:
        cells = _cells(steps_of(self.program, stage, self._gatherings))
        self._check_period(stage, cells)
        return cells

    def _check_order(self, stage: int) -> None:
        """A call is cut out where 1F1B's order, p − 1 − s forwards ahead of the backwards, has a batch's end."""
        ahead, every = self.stages - 1 - stage, units(self.program.schedule.micro_batches)
        expected = alternate(every, every, ahead)
        found = (action for action in self.program.schedule.actions[stage] if action.kind in COMPUTE)
        if any(map(ne, found, expected)):
            raise ScheduleError(
                f"schedule={self._name}: stage {stage} does not run {ahead} forwards ahead of its backwards, one of "
                "each in turn, as every stream of batches in a run has to: choose 2bw"
            )

    def _check_places(self) -> None:
        """Past the warm-up, places in the order repeat with each stage's period, and all stages have one pace."""
        schedule, order = self.program.schedule, self.program.order
        table, paces = schedule.table, set()
        gathered = np.where(_FINISHING[table.kind] > 0, self._gatherings[table.micro_batch], -1)
        sent = following(order.messages, order.wiring.gives)
        for stage in range(self.stages):
            period, rows = self._period(stage), table.of(stage)
            forwards = rows.start + np.flatnonzero(table.kind[rows] == ord(FORWARD))
            begin, again, end = forwards[[self._first, self._first + period, self._last]].tolist()
            took = int(order.places[again] - order.places[begin])
            paces.add(Fraction(took, period))
            wrong = np.full(end - again, len(paces) > 1)
            for column, by in (
                *((table.kind, 0), (table.evictor, 0), (table.micro_batch, period)),
                *((places, took) for places in (order.places, order.messages, sent, gathered)),
            ):
                was = column[begin : begin + end - again]
                wrong |= np.where(was < 0, was, was + by) != column[again:end]
            for action in np.flatnonzero(wrong).tolist()[:1]:
                raise fault_of(schedule, again + action, f"is not {period} micro-batches after the same: {_DEFECT}")

    def _check_period(self, stage: int, cells: Sequence[Sequence[Step]]) -> None:
        period = self._period(stage)
        for forward in range(self._first, self._first + period):
            if _shifted(cells[forward], period) != cells[forward + period]:
                raise ScheduleError(
                    f"stages={self.stages}: stage {stage} does not repeat itself every {period} micro-batches: "
                    f"{_DEFECT}"
                )


def _cells(steps: Sequence[Step]) -> list[list[Step]]:
    """``steps`` by the forward that they follow; what an acceptor does before its first belongs to that."""
    cells: list[list[Step]] = [[]]
    for step in steps:
        if step.action.kind == FORWARD and step.action.micro_batch > 0:
            cells.append([])
        cells[-1].append(step)
    return cells


def _gatherings(program: Program) -> Column:
    """The places of gatherings, as if each micro-batch were the last of a batch: see :class:`Order`.

    The update comes after the first forward of stage 0 that follows its backward, the last of all stages.
    """
    table, places = program.schedule.table, program.order.places
    ended = np.zeros(program.schedule.micro_batches, np.int64)
    finishing = np.flatnonzero(_FINISHING[table.kind])
    np.maximum.at(ended, table.micro_batch[finishing], places[finishing])
    first = table.of(0)
    forwards = places[first][table.kind[first] == ord(FORWARD)][program.schedule.stages :]
    ended[: len(forwards)] = np.maximum(ended[: len(forwards)], forwards - 1)
    return ended + 1


def _backward(cell: Sequence[Step], micro_batch: int) -> int:
    return sum(1 for _ in takewhile(lambda step: step.action[:2] != (BACKWARD, micro_batch), cell))


def _shifted(cell: Sequence[Step], by: int) -> list[Step]:
    def message(one: Message) -> Message:
        return one._replace(micro_batch=one.micro_batch + by)

    def shifted(one: Message | Gathering) -> Message | Gathering:
        return message(one) if isinstance(one, Message) else Gathering(one.batch + by)

    return [
        Step(
            tuple(map(shifted, step.post)),
            tuple(map(message, step.complete)),
            step.action._replace(micro_batch=step.action.micro_batch + by),
            None if step.transfer is None else message(step.transfer),
            tuple(map(shifted, step.then_post)),
            None if step.send is None else message(step.send),
            None if step.takes is None else message(step.takes),
            tuple(map(message, step.follows)),
        )
        for step in cell
    ]
