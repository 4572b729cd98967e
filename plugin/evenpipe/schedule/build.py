"""From a schedule's name to a verified schedule: builder, passes, proof."""

from __future__ import annotations

import difflib

from evenpipe.schedule.bpipe import BALANCED_BOUNDS, balance
from evenpipe.schedule.builders import BUILDERS, k_forward_k_backward
from evenpipe.schedule.collector import without_cycle_collector
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.two_buffered import two_buffered, with_updates
from evenpipe.schedule.verify import verify

__all__ = ["SCHEDULES", "build", "named"]

#: The names that :func:`build` knows.
SCHEDULES = (*BUILDERS, "kfkb", "2bw")


def named(name: str) -> str:
    """``name``, if there is such a schedule. Raises :class:`ScheduleError` with what may have been meant."""
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(SCHEDULES)}"
        raise ScheduleError(f"schedule={name}: unknown schedule, {hint}")
    return name


@without_cycle_collector()
def build(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    bpipe: bool = False,
    batches: int = 1,
    group_size: int = 1,
) -> Schedule:
    """The verified schedule ``name`` for p ``stages`` and m ``micro_batches``, with v ``chunks`` where interleaved.

    kfkb groups k = ``group_size`` micro-batches. 2bw does not flush between ``batches``; its schedule is that of a
    stream of them.

    Raises :class:`ScheduleError` with one line that names the argument, for an unknown name, counts below 1, and
    ``bpipe`` where it has nothing to balance.
    """
    named(name)
    counts = {
        "stages": stages,
        "micro_batches": micro_batches,
        "chunks": chunks,
        "batches": batches,
        "group_size": group_size,
    }
    for argument, value in counts.items():
        if value < 1:
            raise ScheduleError(f"{argument}={value}: must be at least 1")
    schedule = _compute_order(name, stages, micro_batches, chunks, batches, group_size)
    if bpipe:
        if name not in BALANCED_BOUNDS:
            raise ScheduleError(f"bpipe: {name} holds the same on every stage, so there is nothing to balance")
        if stages < 2:
            raise ScheduleError("bpipe: one stage has no partner to evict to; use at least 2 stages")
        balanced = BALANCED_BOUNDS[name](stages, chunks, schedule.group_size)
        schedule = balance(schedule, min(balanced, schedule.bound))
    return verify(with_updates(schedule) if name == "2bw" else schedule)


def _compute_order(name: str, stages: int, micro_batches: int, chunks: int, batches: int, group_size: int) -> Schedule:
    if group_size != 1 and name != "kfkb":
        raise ScheduleError(f"group_size={group_size}: {name} groups no micro-batches: give 1, or choose schedule kfkb")
    if name == "2bw":
        if chunks != 1:
            raise ScheduleError(f"chunks={chunks}: 2bw has one model chunk a stage; only interleaved has more")
        return two_buffered(stages, micro_batches, batches)
    if batches != 1:
        raise ScheduleError(f"batches={batches}: {name} flushes after every batch: give 1, or choose schedule 2bw")
    if name == "kfkb":
        if chunks != 1:
            raise ScheduleError(f"chunks={chunks}: kfkb has one model chunk a stage; only interleaved has more")
        return k_forward_k_backward(stages, micro_batches, min(group_size, micro_batches))
    return BUILDERS[name](stages, micro_batches, chunks)
