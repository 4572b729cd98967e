"""What one batch cost each stage: memory and waiting, as maxima over the processes of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from evenpipe.runtime.executor import Executor

__all__ = ["StageFigures", "per_stage"]


class StageFigures(NamedTuple):
    """One stage, or one of its processes.

    `peak_live`: micro-batches (times model chunks), own plus accepted; `peak_bytes`: what these save; `evicted_bytes`:
    given to the partner, all since the last `reset_peak`. `exposed_ms`: how long compute waited for evictions and
    loads, on either side, and `computed_ms`: how long it lasted, in the last measured batch.
    """

    peak_live: int
    peak_bytes: int
    evicted_bytes: int
    exposed_ms: float
    computed_ms: float = 0.0

    @classmethod
    def of(cls, executor: Executor) -> StageFigures:
        """This process, after a batch that was measured."""
        held = executor.counter.snapshot()
        times = executor.exposed.total_ms(), executor.computed.total_ms()
        return cls(held.peak_units, held.peak_bytes, held.evicted_bytes, *times)

    @classmethod
    def of_row(cls, row: Sequence[float]) -> StageFigures:
        """From numbers as they were exchanged."""
        live, peak, evicted, *times = row
        return cls(int(live), int(peak), int(evicted), *times)


def per_stage(
    mine: StageFigures, stage: int, stages: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[StageFigures, ...]:
    """The largest of each figure, per stage; all ranks of `group` call it, in one all-reduce of doubles on `device`.

    These are exact for all bytes that a machine can hold.
    """
    table = torch.zeros(stages, len(mine), dtype=torch.float64)
    table[stage] = torch.tensor(mine, dtype=torch.float64)
    table = table.to(device)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    return tuple(map(StageFigures.of_row, table.tolist()))
