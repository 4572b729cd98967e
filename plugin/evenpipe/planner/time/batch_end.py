"""Seconds at the end of an iteration: gradients are reduced, the optimizer steps, parameters are gathered."""

from __future__ import annotations

from evenpipe.planner.operations.operation import Parameters
from evenpipe.planner.run import Run
from evenpipe.planner.time.kernels import Kernels

__all__ = ["batch_end"]

#: What Adam in mixed precision reads and writes a parameter: gradient, copy, norm, clipping, moments, both weights.
_STEP_BYTES = 58


def batch_end(parameters: Parameters, run: Run, kernels: Kernels, beside: float) -> float:
    """Of one stage. ``beside``: seconds of the last micro-batch's backward, which a reduction may hide behind."""
    replicas = run.data * run.context
    shards = (replicas, replicas // run.expert)
    gradient = 4 if run.gradients_in_fp32 else 2
    seconds = 0.0
    for count, size, experts in zip(parameters, shards, (False, True), strict=True):
        ring = (size - 1) / size * count
        # An all-reduce is a reduce-scatter and a gathering; ZeRO-1 gathers parameters instead of gradients.
        reduced = kernels.links.reduction(ring * gradient, experts)
        gathered = kernels.links.reduction(ring * (run.element_bytes if run.sharded_optimizer else gradient), experts)
        seconds += max(0.0, reduced - beside) if run.overlap_gradients else reduced
        seconds += max(0.0, gathered - beside / 2) if run.overlap_parameters else gathered
        seconds += kernels.moved(_STEP_BYTES * count / (size if run.sharded_optimizer else 1))
    return seconds
