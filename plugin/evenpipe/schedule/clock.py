"""A logical clock: when each compute action ends if communication takes nothing."""

from __future__ import annotations

import numpy as np

from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.kinds import KINDS
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.table import Column, by_kind
from evenpipe.schedule.wiring import senders

__all__ = ["TICKS", "boundaries"]

#: By kind: see :class:`evenpipe.schedule.kinds.ActionKind`.
TICKS = {letter: row.ticks for letter, row in KINDS.items()}
_TICKS = by_kind(lambda row: row.ticks)


def boundaries(schedule: Schedule) -> list[Column]:
    """Per stage, the times at which its compute actions end, in order; the schedule has no others.

    Raises :class:`ScheduleError` if the compute orders wait for one another in a circle.
    """
    table = schedule.table
    end = table.first[1:]
    ticks, takes = _TICKS[table.kind], senders(schedule).astype(np.int64)
    takes[takes < 0] = len(takes)
    ends = np.full(len(takes) + 1, -1, np.int64)
    ends[-1] = 0  # what needs nothing has it at the start
    now, at = np.zeros(len(end), np.int64), table.first[:-1].copy()
    going = np.flatnonzero(at < end)
    while len(going):
        # All stages at once: each carries out its next action if what that needs is there.
        there = ends[takes[at[going]]]
        able, there = going[there >= 0], there[there >= 0]
        if not len(able):
            stage = int(going[0])
            stuck = schedule.actions[stage][int(at[stage] - table.first[stage])]
            raise ScheduleError(f"stage {stage} waits for ever before {stuck}: the compute orders form a circle")
        now[able] = np.maximum(now[able], there) + ticks[at[able]]
        ends[at[able]] = now[able]
        at[able] += 1
        going = np.flatnonzero(at < end)
    return [ends[table.of(stage)] for stage in range(schedule.stages)]
