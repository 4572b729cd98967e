"""Weight versions without flushes: which a micro-batch needs, when a step is finished, and the proof of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from evenpipe.schedule.actions import Action
from evenpipe.schedule.kinds import COMPUTE, FINISHING, FORWARD, UPDATE
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.table import own_peak

__all__ = ["required_version", "version_fault", "with_updates"]


def required_version(batch: int) -> int:
    """The weight version that all micro-batches of ``batch`` (from 0) use, forward and backward.

    "the weight version to be used for microbatch k is max(⌊(k − 1)/m⌋ − 1, 0)" (PipeDream-2BW §3.1, k from 1).
    """
    return max(batch - 1, 0)


def with_updates(schedule: Schedule, update_follows: Callable[[int], int]) -> Schedule:
    """``schedule`` with each batch's update in its place; those of the last batch come when all is done.

    ``update_follows(batch)`` is the micro-batch after whose forward, on every stage, the update of ``batch`` is
    finished.
    """
    updates = {update_follows(batch): Action(UPDATE, batch) for batch in range(schedule.batches - 1)}
    last = Action(UPDATE, schedule.batches - 1)
    rows = tuple((*_insert(row, updates), last) for row in schedule.actions)
    return replace(schedule, actions=rows, weight_versions=2)


def _insert(row: tuple[Action, ...], updates: dict[int, Action]) -> Iterator[Action]:
    for action in row:
        yield action
        if action.kind == FORWARD and action.micro_batch in updates:
            yield updates[action.micro_batch]


def version_fault(schedule: Schedule, stage: int) -> tuple[int, str] | None:
    """The first step of ``stage`` that breaks the version rule of PipeDream-2BW §3.1, and how; None without a fault.

    A stage has two buffers. The update of batch t writes W(t+1) over W(t−1), so all of batch t must be backwarded by
    then: its forwards and backwards, each there once, are the last that use W(t−1). What a forward or backward needs
    has thus never been overwritten; it may only not be there yet.
    """
    row, micro_batches, batches = schedule.actions[stage], schedule.micro_batches, schedule.batches
    updated = 0  # batches; W(updated) is the newest version
    unfinished = [micro_batches * schedule.chunks] * batches
    for step, action in enumerate(row):
        if action.kind == UPDATE:
            batch = action.micro_batch
            if not 0 <= batch < batches:
                return step, f"{action} is the update of none of {batches} batches"
            if batch != updated:
                return step, f"{action} comes where U{updated} was expected"
            if unfinished[batch]:
                return step, f"{action} comes before the last backward of batch {batch}"
            updated += 1
        elif action.kind in COMPUTE:
            batch = action.micro_batch // micro_batches
            needed = required_version(batch)
            if needed > updated:
                return step, f"{action} needs weight version {needed}, which is not there yet"
            unfinished[batch] -= action.kind in FINISHING
    if updated < batches:
        return len(row) - 1, f"U{updated} is missing"
    if (in_flight := own_peak(schedule.table.kind[schedule.table.of(stage)])) > (
        allowed := (schedule.stages - stage) * schedule.chunks
    ):
        return 0, f"stage {stage} has {in_flight} micro-batches in flight; 2bw allows {allowed}"
    return None
