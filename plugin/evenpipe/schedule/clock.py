"""A logical clock: when each compute action starts if a forward takes 1, a backward 2 and communication nothing."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.schedule.actions import BACKWARD, COMPUTE, FORWARD, Action
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.topology import Message, incoming, outgoing

__all__ = ["DURATION", "boundaries"]

#: "In general, backward computation takes twice as long as forward computation" (BPipe, Appendix B).
DURATION = {FORWARD: 1, BACKWARD: 2}


def boundaries(rows: Sequence[Sequence[Action]], chunks: int) -> list[list[int]]:
    """Per stage, the times at which its compute actions end, in order; transfers are skipped.

    Raises :class:`ScheduleError` if the compute orders wait for one another in a circle.
    """
    stages = len(rows)
    compute = [[action for action in row if action.kind in COMPUTE] for row in rows]
    ends: list[list[int]] = [[] for _ in rows]
    arrived: dict[Message | None, int] = {None: 0}
    waiting: dict[Message | None, int] = {}
    runnable = list(range(stages))
    while runnable:
        stage = runnable.pop()
        row, done = compute[stage], ends[stage]
        while len(done) < len(row):
            action = row[len(done)]
            need = incoming(action, stage, stages, chunks)
            if need not in arrived:
                waiting[need] = stage
                break
            start = max(done[-1] if done else 0, arrived[need])
            end = start + DURATION[action.kind]
            done.append(end)
            result = outgoing(action, stage, stages, chunks)
            if result is not None:
                arrived[result] = end
                if result in waiting:
                    runnable.append(waiting.pop(result))
    for stage, (row, done) in enumerate(zip(compute, ends, strict=True)):
        if len(done) < len(row):
            raise ScheduleError(f"stage {stage} waits for ever before {row[len(done)]}: the compute orders form a circle")
    return ends
