"""What a plan predicted of each stage's time and memory, beside what the run measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenpipe.deepspeed.static_memory import static_bytes
from evenpipe.partition.code import compare_with_plan
from evenpipe.partition.search.plan import Plan
from evenpipe.runtime.resources import StageFigures

__all__ = ["PlanComparison"]


class PlanComparison:
    """The comparison of `engine` with `plan`, whose stages it has.

    All ranks make it, when model and optimizer are there.
    """

    def __init__(self, engine: Any, plan: Plan) -> None:
        self._plan = plan
        table = torch.zeros(engine.num_stages, dtype=torch.float64)
        table[engine.stage_id] = static_bytes(engine)
        table = table.to(engine.device)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        self._static_bytes = [int(nbytes) for nbytes in table.tolist()]

    def lines(self, stages: Sequence[StageFigures]) -> list[str]:
        """Return a line a stage, of a batch that was measured."""
        held = zip(stages, self._static_bytes, strict=True)
        return compare_with_plan(self._plan, [one._replace(peak_bytes=one.peak_bytes + static) for one, static in held])
