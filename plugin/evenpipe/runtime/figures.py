"""What one batch cost each stage: memory and waiting, as maxima over the processes of a stage."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from evenpipe.runtime.executor import Executor

__all__ = ["StageFigures", "per_stage"]


class StageFigures(NamedTuple):
    """One stage, or one of its processes.

    `peak_live`: micro-batches (times model chunks), own plus accepted; `peak_bytes`: what these save; `evicted_bytes`:
    given to the partner, all since the last `reset_peak`. `exposed_ms`: how long compute waited for evictions and
    loads, on either side, in the last measured batch.
    """

    peak_live: int
    peak_bytes: int
    evicted_bytes: int
    exposed_ms: float

    @classmethod
    def of(cls, executor: Executor) -> StageFigures:
        """This process, after a batch that was measured."""
        held = executor.counter.snapshot()
        return cls(held.peak_units, held.peak_bytes, held.evicted_bytes, executor.exposed.total_ms())


def per_stage(mine: StageFigures, stage: int, stages: int, device: torch.device) -> tuple[StageFigures, ...]:
    """The largest of each figure, per stage; all ranks call it, in one all-reduce of `stages` x 4 doubles on `device`.

    Doubles are exact for all bytes that a machine can hold.
    """
    table = torch.zeros(stages, len(mine), dtype=torch.float64)
    table[stage] = torch.tensor(mine, dtype=torch.float64)
    table = table.to(device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    rows = table.tolist()
    return tuple(StageFigures(int(live), int(peak), int(evicted), ms) for live, peak, evicted, ms in rows)
