"""2BW: 1F1B over a stream of batches, without flushes; the step of a batch is finished while the next one runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from evenpipe.schedule.actions import FORWARD, UPDATE, Action
from evenpipe.schedule.builders import one_forward_one_backward
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.schedule import Schedule

__all__ = ["required_version", "two_buffered", "update_follows", "with_updates"]


def required_version(batch: int) -> int:
    """The weight version that all micro-batches of ``batch`` (from 0) use, forward and backward.

    "the weight version to be used for microbatch k is max(⌊(k − 1)/m⌋ − 1, 0)" (PipeDream-2BW §3.1, k from 1).
    """
    return max(batch - 1, 0)


def two_buffered(stages: int, micro_batches: int, batches: int) -> Schedule:
    """The compute order of 2BW (PipeDream-2BW §3.1, Figure 2), without its updates: see :func:`with_updates`.

    Stage s runs p − s − 1 forwards ahead of its backwards, from one batch into the next::

        p=2, m=2   stage 0   F0 F1 B0 F2 U0 B1 | F3 B2 F4 ..
                   stage 1      F0 B0 F1 B1    | F2 B2 F3 U0 B3 ..
    """
    if micro_batches < stages:
        raise ScheduleError(
            f"micro_batches={micro_batches}: 2bw needs at least as many as there are stages ({stages}), or a batch "
            f"would start before the weights that it needs are there: use {stages} or more, or schedule 1f1b"
        )
    stream = one_forward_one_backward(stages, micro_batches * batches)
    return replace(stream, name="2bw", micro_batches=micro_batches, batches=batches)


def update_follows(stages: int, micro_batches: int, batch: int) -> int:
    """The micro-batch after whose forward, on every stage, the update of ``batch`` is finished.

    It is the first that stage 0 forwards after its last backward of ``batch``, which is the last of all stages. So once
    it is there, whatever the update needs of other stages is under way: no stage waits for another. It comes before
    the first forward on the new weights if m ≥ p; on stage 0 it comes before the first backward of the next batch.
    """
    return (batch + 1) * micro_batches + stages - 1


def with_updates(schedule: Schedule) -> Schedule:
    """``schedule`` with each batch's update in its place; those of the last batch come when all is done."""
    updates = {
        update_follows(schedule.stages, schedule.micro_batches, batch): Action(UPDATE, batch)
        for batch in range(schedule.batches - 1)
    }
    last = Action(UPDATE, schedule.batches - 1)
    rows = tuple((*_insert(row, updates), last) for row in schedule.actions)
    return replace(schedule, actions=rows)


def _insert(row: tuple[Action, ...], updates: dict[int, Action]) -> Iterator[Action]:
    for action in row:
        yield action
        if action.kind == FORWARD and action.micro_batch in updates:
            yield updates[action.micro_batch]
