"""The proof that 2BW's weight versions are there when they are needed, and are never more than two."""

from __future__ import annotations

from evenpipe.schedule.actions import BACKWARD, COMPUTE, UPDATE
from evenpipe.schedule.residency import own_peak
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.two_buffered import required_version

__all__ = ["version_fault"]


def version_fault(schedule: Schedule, stage: int) -> tuple[int, str] | None:
    """The first step of ``stage`` that breaks the version rule of PipeDream-2BW §3.1, and how; None without a fault.

    A stage has two buffers. The update of batch t writes W(t+1) over W(t−1), so all of batch t must be backwarded by
    then: its forwards and backwards, each there once, are the last that use W(t−1). What a forward or backward needs
    has thus never been overwritten; it may only not be there yet.
    """
    row, micro_batches, batches = schedule.actions[stage], schedule.micro_batches, schedule.batches
    updated = 0  # batches; W(updated) is the newest version
    backwarded = [0] * batches
    for step, action in enumerate(row):
        if action.kind == UPDATE:
            batch = action.micro_batch
            if batch >= batches:
                return step, f"{action} is the update of none of {batches} batches"
            if batch != updated:
                return step, f"{action} comes where U{updated} was expected"
            if backwarded[batch] < micro_batches:
                return step, f"{action} comes before the last backward of batch {batch}"
            updated += 1
        elif action.kind in COMPUTE:
            batch = action.micro_batch // micro_batches
            needed = required_version(batch)
            if needed > updated:
                return step, f"{action} needs weight version {needed}, which is not there yet"
            backwarded[batch] += action.kind == BACKWARD
    if updated < batches:
        return len(row) - 1, f"U{updated} is missing"
    if (in_flight := own_peak(row)) > schedule.stages - stage:
        return 0, f"stage {stage} has {in_flight} micro-batches in flight; 2bw allows {schedule.stages - stage}"
    return None
