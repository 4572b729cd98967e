"""Seconds at the end of an iteration: gradients are reduced, the optimizer steps, parameters are gathered."""

from __future__ import annotations

from typing import NamedTuple

from evenpipe.planner.operations.operation import Parameters
from evenpipe.planner.run import Run
from evenpipe.planner.time.kernels import Kernels

__all__ = ["Beside", "batch_end"]

#: What Adam in mixed precision reads and writes a parameter: gradient, copy, norm, clipping, moments, both weights.
_STEP_BYTES = 58


class Beside(NamedTuple):
    """Seconds of a micro-batch's forward and backward, behind which what is overlapped may hide."""

    forward: float
    backward: float


def batch_end(parameters: Parameters, run: Run, kernels: Kernels, beside: Beside, embedding: float = 0) -> float:
    """Of one stage. ``embedding``: parameters of it that another stage has a copy of, whose gradients are summed.

    Reductions hide behind the last micro-batch's backward, gatherings behind the first one's forward: those of experts
    and of all else behind the same.
    """
    gradient = 4 if run.gradients_in_fp32 else 2
    reduced = gathered = stepped = 0.0
    for count, size, experts in zip(parameters, (run.replicas, run.expert_replicas), (False, True), strict=True):
        if not count:
            continue
        ring = (size - 1) / size * count
        # An all-reduce is a reduce-scatter and a gathering; ZeRO-1 gathers parameters instead of gradients.
        again = run.element_bytes if run.sharded_optimizer else gradient
        reduced += kernels.links.reduction(ring * gradient, experts)
        if run.sharded_optimizer:
            gathered += kernels.links.reduction(ring * again, experts)
        else:
            reduced += kernels.links.reduction(ring * again, experts)
        stepped += kernels.moved(_STEP_BYTES * count / (size if run.sharded_optimizer else 1))
    if run.overlap_gradients:
        reduced = max(0.0, reduced - beside.backward)
    if run.overlap_parameters:
        gathered = max(0.0, gathered - beside.forward)
    return reduced + gathered + stepped + kernels.links.between_ends(embedding * gradient)
