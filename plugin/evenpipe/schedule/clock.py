"""A logical clock: when each compute action ends if communication takes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.schedule.actions import Action
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.kinds import COMPUTE, KINDS
from evenpipe.schedule.topology import Message, Routes

__all__ = ["TICKS", "boundaries"]

#: By kind: see :class:`evenpipe.schedule.kinds.ActionKind`.
TICKS = {letter: row.ticks for letter, row in KINDS.items()}


def boundaries(rows: Sequence[Sequence[Action]], routes: Routes) -> list[list[int]]:
    """Per stage, the times at which its compute actions end, in order; transfers are skipped.

    Raises :class:`ScheduleError` if the compute orders wait for one another in a circle.
    """
    compute = [[action for action in row if action.kind in COMPUTE] for row in rows]
    ends: list[list[int]] = [[] for _ in rows]
    arrived: dict[Message, int] = {}
    waiting: dict[Message, int] = {}
    runnable = list(range(len(rows)))
    while runnable:
        stage = runnable.pop()
        row, done = compute[stage], ends[stage]
        last = done[-1] if done else 0
        while len(done) < len(row):
            action = row[len(done)]
            needed = routes.incoming(action, stage)
            if needed is not None:
                if needed not in arrived:
                    waiting[needed] = stage
                    break
                last = max(last, arrived.pop(needed))
            last += TICKS[action.kind]
            done.append(last)
            given = routes.outgoing(action, stage)
            if given is not None:
                arrived[given] = last
                if given in waiting:
                    runnable.append(waiting.pop(given))
    for stage, (row, done) in enumerate(zip(compute, ends, strict=True)):
        if len(done) < len(row):
            stuck = row[len(done)]
            raise ScheduleError(f"stage {stage} waits for ever before {stuck}: the compute orders form a circle")
    return ends
