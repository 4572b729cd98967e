"""A stream of batches without an end: a schedule whose steady part is repeated, cut into one call a batch.

1. Unroll. One long batch has the compute order of many short ones, so a stretch of so many micro-batches is built and
   verified as any other schedule (:func:`.build.build`), with gatherings as if each micro-batch ended a batch.
2. Take the steady part. Past its warm-up a stage repeats itself: what it posts every p micro-batches, after which a
   micro-batch is back, and what it trades every p − 2 − s, where s is the pair's evictor.
3. Verify that it repeats. For all stages at once, before anything runs: over twice the longest period, all that stands
   at an action stands there again one period later, at the same pace on all stages (:meth:`Stream._check_places`). Of
   a stage's steps, when it is first asked for any: the steady part, repeated, is the rest of the stretch
   (:class:`_Endless`).
4. Cut. A call of a batch goes from the last backward of the batch before to its own last backward, and the update of
   the batch before comes into its place, after what is gathered of that batch.

So no stage waits for ever. The stretch has one order (:mod:`evenpipe.schedule.lower`). Two stages that give a message,
a transfer or a gathering the same places for as long as both their periods together do so for ever (Fine and Wilf's
theorem), and each stage's part of the order goes on as it repeats. This proof does not cover :meth:`Stream.owed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from operator import ne
from typing import Any, Final

import numpy as np

from evenpipe.schedule.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    SWAP_OUT,
    UPDATE,
    Action,
    ScheduleError,
)
from evenpipe.schedule.build import build
from evenpipe.schedule.lower import Lazy, Program, Step, check_gatherings, steps_of
from evenpipe.schedule.order import Queues
from evenpipe.schedule.passes import Swaps
from evenpipe.schedule.schedule import DEFECT, fault_of, marked
from evenpipe.schedule.spec import Size, Spec, alternate, units
from evenpipe.schedule.table import Column, following
from evenpipe.schedule.topology import Gathering, Message, partner

__all__ = ["Stream"]

_DEFECT: Final = f"{DEFECT}: report it, and run without bpipe"


class Stream:
    """The steps of a schedule without flushes, for ever: the schedule of any number of batches begins so.

    ``swaps``: see :func:`build`. ``program``: the unrolled stretch.
    Raises ScheduleError where :func:`build` does.
    """

    def __init__(
        self,
        spec: Spec,
        stages: int,
        micro_batches: int,
        bpipe: bool = False,
        queues: Queues = "many",
        swaps: Swaps = (),
    ) -> None:
        if not spec.goes_on:
            raise ScheduleError(f"schedule={spec.name}: flushes, or ends with its last batch: choose 2bw")
        self._size = spec.fitted(Size(stages, micro_batches))
        self._update_follows = spec.update_follows
        if self._update_follows is None and micro_batches < stages:
            raise ScheduleError(
                f"micro_batches={micro_batches}: a run under {spec.name} needs at least as many as there are stages "
                f"({stages}), since data is read one batch ahead: use {stages} or more"
            )
        self._name = spec.name
        self.stages = stages
        self.micro_batches = micro_batches
        self._bpipe = bpipe
        self._first = 2 * stages  # a forward in the steady state of every stage
        self._last = self._first + 2 * max(map(self._period, range(stages)))
        flushing = replace(spec, update_follows=None, needs=spec.needs - {"stream", "in_place"})
        self.program: Program = build(flushing, Size(stages, self._last + stages + 4), bpipe, queues, swaps)
        for stage in range(stages):
            self._check_compute(stage)
        self._gatherings = _gatherings(self.program)
        with marked(self.program.schedule):
            check_gatherings(self.program.order, self._gatherings, 1)
            self._check_places()
        self._endless = Lazy(stages, self._repeating)

    def call(self, stage: int, batch: int, update_early: bool = False) -> list[Step]:
        """The steps after the last backward of the batch before ``batch`` (from 0), up to and with that of ``batch``.

        Forwards reach into the batch after. The update of the batch before is finished where ``Spec.update_follows``
        says, or, with ``update_early``, before the first backward: for a stage that need not wait for others to update.
        Of a schedule that updates in place, the batch's own update comes last.
        """
        first, last = batch * self.micro_batches, (batch + 1) * self.micro_batches - 1
        steps = [self._of_batches(step) for step in self._endless[stage].between(first - 1, last)]
        if self._update_follows is None:
            return [*steps, Step((), (), Action(UPDATE, batch))]
        if batch == 0:
            return steps
        after = first + self.stages - 1 - stage if update_early else self._update_follows(self._size, batch - 1)
        at, gathering = _insert_update(steps, batch - 1, after), Gathering(batch - 1)
        waits = stage == 0 or not update_early
        if waits and not any(gathering in (*step.post, *step.then_post) for step in steps[: at + 1]):
            raise ScheduleError(
                f"schedule={self._name}: stage {stage} would wait for ever to finish the step of batch {batch - 1}: "
                "it comes before it is gathered what all stages know of that batch: choose 2bw"
            )
        return steps

    def owed(self, stage: int, batch: int) -> list[Step]:
        """Return what ``stage`` still has to take part in if the stream is broken off after the call of ``batch``.

        These are receives of what neighbours have sent by then, and transfers that its partner has started, in order.
        Every message then has both its ends.
        """
        cut, around = (batch + 1) * self.micro_batches - 1, 2 * self.stages
        others = {stage - 1, stage + 1, partner(stage, self.stages)} - {stage, -1, self.stages}
        theirs = [step for other in others for step in self._endless[other].between(cut - around, cut)]
        begun = {message for step in theirs for message in (step.transfer, step.send)} - {None}
        pending = (
            Step(
                tuple(item for item in (*step.post, *step.then_post) if item in begun),
                step.complete,
                step.action,
                step.transfer if step.transfer in begun else None,
                follows=step.follows,
            )
            for step in self._endless[stage].between(cut, cut + around)
        )
        return [step for step in pending if step.post or step.transfer is not None]

    def _of_batches(self, step: Step) -> Step:
        """``step`` with the gatherings of batches in place of those of micro-batches."""

        def gathered(items: Sequence[Message | Gathering]) -> tuple[Message | Gathering, ...]:
            return tuple(
                Gathering(item.batch // self.micro_batches) if isinstance(item, Gathering) else item
                for item in items
                if isinstance(item, Message) or (item.batch + 1) % self.micro_batches == 0
            )

        return step._replace(post=gathered(step.post), then_post=gathered(step.then_post))

    def _period(self, stage: int) -> int:
        evictor = min(stage, partner(stage, self.stages))
        return math.lcm(self.stages, max(1, self.stages - 2 - evictor)) if self._bpipe else self.stages

    def _repeating(self, stage: int) -> _Endless:
        steps, period = steps_of(self.program, stage, self._gatherings), self._period(stage)
        endless = _Endless(steps, self._first, period)
        if not endless.goes_on_to(self._last):
            raise ScheduleError(
                f"stages={self.stages}: stage {stage} does not repeat itself every {period} micro-batches: {_DEFECT}"
            )
        return endless

    def _check_compute(self, stage: int) -> None:
        """A call is cut out where 1F1B's order, p − 1 − s forwards ahead of the backwards, has a batch's end."""
        ahead, every = self.stages - 1 - stage, units(self.program.schedule.micro_batches)
        compute = (action for action in self.program.schedule.actions[stage] if action.kind in COMPUTE)
        if any(map(ne, compute, alternate(every, every, ahead))):
            raise ScheduleError(
                f"schedule={self._name}: stage {stage} does not run {ahead} forwards ahead of its backwards, one of "
                "each in turn, as every stream of batches in a run has to: choose 2bw"
            )

    def _check_places(self) -> None:
        """Past the warm-up, places in the order repeat with each stage's period, and all stages have one pace."""
        schedule, order = self.program.schedule, self.program.order
        table, paces = schedule.table, set()
        # All that stands at an action: what it is, and the places of it and of what its stage is given around it.
        same, of_unit = (table.kind, table.evictor), table.micro_batch
        gathered = np.where(table.finishing, self._gatherings[table.micro_batch], -1)
        places = (order.places, order.messages, following(order.messages, order.wiring.gives), gathered)
        for stage in range(self.stages):
            period, rows = self._period(stage), table.of(stage)
            forwards = rows.start + np.flatnonzero(table.kind[rows] == ord(FORWARD))
            begin, again, end = forwards[[self._first, self._first + period, self._last]].tolist()
            took = int(order.places[again] - order.places[begin])  # by the clock, in one period
            paces.add(Fraction(took, period))
            wrong = np.full(end - again, len(paces) > 1)
            for column, later in (*((one, 0) for one in same), (of_unit, period), *((one, took) for one in places)):
                before = column[begin : begin + end - again]
                wrong |= np.where(before < 0, before, before + later) != column[again:end]  # -1 is nothing, and stays
            for action in np.flatnonzero(wrong).tolist()[:1]:
                raise fault_of(schedule, again + action, f"is not {period} micro-batches after the same: {_DEFECT}")


class _Endless:
    """One stage's steps for ever: those of a stretch, whose steady part is repeated.

    The steady part begins with the forward of micro-batch ``first`` and has ``period`` micro-batches.
    """

    def __init__(self, steps: Sequence[Step], first: int, period: int) -> None:
        self._steps, self._first, self._period = steps, first, period
        #: By micro-batch, the index of its forward, and the index after its backward.
        self._forwards = [at for at, step in enumerate(steps) if step.action.kind == FORWARD]
        self._ends = [at + 1 for at, step in enumerate(steps) if step.action.kind == BACKWARD]
        self._begin = self._forwards[first]
        self._length = self._forwards[first + period] - self._begin

    def between(self, after: int, last: int) -> list[Step]:
        """The steps after the backward of micro-batch ``after`` (before 0: from the start), to that of ``last``."""
        return [self._step(number) for number in range(self._end(after), self._end(last))]

    def goes_on_to(self, last: int) -> bool:
        """Return whether the steady part, repeated, is the rest of the stretch up to micro-batch ``last``'s forward."""
        rest = range(self._begin + self._length, self._forwards[last])
        return all(self._step(number) == self._steps[number] for number in rest)

    def _step(self, number: int) -> Step:
        times = max(0, (number - self._begin) // self._length)
        step: Step = _later(self._steps[number - times * self._length], times * self._period)
        return step

    def _end(self, micro_batch: int) -> int:
        """Return how many steps there are up to the backward of that micro-batch, included."""
        times = max(0, (micro_batch - self._first) // self._period)
        return self._ends[micro_batch - times * self._period] + times * self._length if micro_batch >= 0 else 0


def _later(item: Any, by: int) -> Any:
    """Return a step, or a part of one, so many micro-batches later."""
    match item:
        case Message() | Action():
            return item._replace(micro_batch=item.micro_batch + by)
        case Gathering():
            return Gathering(item.batch + by)
        case Step():
            return Step(*(_later(part, by) for part in item))
        case tuple():
            return tuple(_later(part, by) for part in item)
    return item


def _insert_update(steps: list[Step], batch: int, after: int) -> int:
    """Put the update of ``batch`` behind the forward of micro-batch ``after``, and return its index.

    The update needs what is gathered of the batch, and may come right after that.
    """
    at = next(index for index, step in enumerate(steps) if step.action[:2] == (FORWARD, after)) + 1
    posts, gathering = steps[at].post, Gathering(batch)
    before = posts.index(gathering) + 1 if gathering in posts else 0
    steps[at] = steps[at]._replace(post=posts[before:])
    at += steps[at].action.kind == SWAP_OUT  # which belongs to the forward
    steps.insert(at, Step(posts[:before], (), Action(UPDATE, batch)))
    return at


def _gatherings(program: Program) -> Column:
    """Return the places of gatherings, as if each micro-batch were the last of a batch: see :class:`Order`.

    The update comes after the first forward of stage 0 that follows its backward, the last of all stages.
    """
    table, places = program.schedule.table, program.order.places
    ended = np.zeros(program.schedule.micro_batches, np.int64)
    finishing = np.flatnonzero(table.finishing)
    np.maximum.at(ended, table.micro_batch[finishing], places[finishing])
    first = table.of(0)
    forwards = places[first][table.kind[first] == ord(FORWARD)][program.schedule.stages :]
    ended[: len(forwards)] = np.maximum(ended[: len(forwards)], forwards - 1)
    return ended + 1
