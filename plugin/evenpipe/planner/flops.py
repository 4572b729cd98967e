"""Floating-point operations of the model, which model FLOPS utilization counts."""

from __future__ import annotations

from evenpipe.planner.descriptions import Model
from evenpipe.planner.operations.operation import Gemm
from evenpipe.planner.operations.parts import Blocks, parts_of
from evenpipe.planner.run import Run

__all__ = ["model_flops"]

#: A backward has two matrix products where a forward has one.
_PASSES = 3


def model_flops(model: Model, run: Run) -> float:
    """Of an iteration: matrix products forward and backward, once each, attention as if nothing were masked.

    For GPT this is 72 B s L h² (1 + s/6h + V/12Lh) (Korthikanti et al. 2022, Appendix A).
    """
    alone = Run(global_batch=run.global_batch, precision=run.precision, attention="unfused")
    blocks = Blocks(model, alone)
    sample = sum(
        count * work.flops
        for part in parts_of(model, alone)
        for block, count in part.items()
        for operation in blocks.operations[block]
        for work in operation.forward
        if isinstance(work, Gemm)
    )
    return _PASSES * sample * run.global_batch
