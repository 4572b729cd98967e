"""A logical clock: when each compute action starts if a forward takes 1, a backward 2 and communication nothing."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.schedule.actions import BACKWARD, COMPUTE, FORWARD, Action
from evenpipe.schedule.errors import ScheduleError

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
    # Results are named by the action that takes them: (stage, kind, micro-batch, chunk).
    arrived: dict[tuple[int, str, int, int], int] = {}
    waiting: dict[tuple[int, str, int, int], int] = {}
    runnable = list(range(stages))
    while runnable:
        stage = runnable.pop()
        row, done = compute[stage], ends[stage]
        last = done[-1] if done else 0
        while len(done) < len(row):
            kind, micro_batch, chunk, _ = row[len(done)]
            step = 1 if kind == FORWARD else -1
            position, end_of_model = chunk * stages + stage, (0 if kind == FORWARD else chunks * stages - 1)
            if position != end_of_model:
                mine = (stage, kind, micro_batch, chunk)
                if mine not in arrived:
                    waiting[mine] = stage
                    break
                last = max(last, arrived.pop(mine))
            last += DURATION[kind]
            done.append(last)
            following, taker = divmod(position + step, stages)
            theirs = (taker, kind, micro_batch, following)
            arrived[theirs] = last
            if theirs in waiting:
                runnable.append(waiting.pop(theirs))
    for stage, (row, done) in enumerate(zip(compute, ends, strict=True)):
        if len(done) < len(row):
            stuck = row[len(done)]
            raise ScheduleError(f"stage {stage} waits for ever before {stuck}: the compute orders form a circle")
    return ends
