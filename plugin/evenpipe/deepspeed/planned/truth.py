"""What a plan predicted of each stage's time and memory, beside what the run measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenpipe.deepspeed.static_memory import static_bytes
from evenpipe.partition.search.plan import Plan
from evenpipe.report.truth import Taken, truth_lines
from evenpipe.runtime.figures import StageFigures

__all__ = ["Truth"]


class Truth:
    """Of `engine`, whose stages are those of `plan`; all ranks make it, when model and optimizer are there."""

    def __init__(self, engine: Any, plan: Plan) -> None:
        self._plan = plan
        self._micro_batches = engine.micro_batches
        table = torch.zeros(engine.num_stages, dtype=torch.float64)
        table[engine.stage_id] = static_bytes(engine)
        table = table.to(engine.device)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        self._static_bytes = [int(nbytes) for nbytes in table.tolist()]

    def lines(self, stages: Sequence[StageFigures]) -> list[str]:
        """A line a stage, of a batch that was measured."""
        parts = self._plan.stages
        names = [f"nodes {part.first_node}–{part.last_node}" for part in parts]
        predicted = [Taken(part.forward_ms + part.backward_ms + part.extra_ms, part.peak_bytes) for part in parts]
        measured = [
            Taken(figures.computed_ms / self._micro_batches, figures.peak_bytes + static)
            for figures, static in zip(stages, self._static_bytes, strict=True)
        ]
        return truth_lines(names, predicted, measured)
