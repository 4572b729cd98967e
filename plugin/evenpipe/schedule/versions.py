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
    then, and nothing may use W(t−1) any more. Each forward and backward needs the version that the rule gives it.
    """
    row, micro_batches = schedule.actions[stage], schedule.micro_batches
    live = {0}
    updated = 0  # batches
    backwarded = [0] * schedule.batches
    for step, action in enumerate(row):
        if action.kind == UPDATE:
            batch = action.micro_batch
            if batch != updated or batch >= schedule.batches:
                return step, f"{action} comes where U{updated} was expected"
            if backwarded[batch] < micro_batches:
                return step, f"{action} comes before the last backward of batch {batch}"
            live = {batch, batch + 1}
            updated += 1
        elif action.kind in COMPUTE:
            batch = action.micro_batch // micro_batches
            needed = required_version(batch)
            if needed not in live:
                state = "overwritten already" if needed < max(live) else "not there yet"
                return step, f"{action} needs weight version {needed}, which is {state}"
            backwarded[batch] += action.kind == BACKWARD
    if updated < schedule.batches:
        return len(row) - 1, f"U{updated} is missing"
    if (in_flight := own_peak(row)) > schedule.stages - stage:
        return 0, f"stage {stage} has {in_flight} micro-batches in flight; 2bw allows {schedule.stages - stage}"
    return None
