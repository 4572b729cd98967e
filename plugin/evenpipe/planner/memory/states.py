"""Weights, gradients and optimizer state of one GPU."""

from __future__ import annotations

from typing import NamedTuple

from evenpipe.planner.operations.operation import Parameters
from evenpipe.planner.run import Run

__all__ = ["States", "states"]


class States(NamedTuple):
    """Bytes that stay; ``step``: those that only the optimizer's step takes."""

    weights: float
    gradients: float
    optimizer: float
    step: float

    @property
    def stay(self) -> float:
        return self.weights + self.gradients + self.optimizer


def states(parameters: Parameters, run: Run, versions: int = 1) -> States:
    """Mixed precision with Adam: parameters in 2 bytes, gradients in 2 or 4, and 12 bytes of fp32 weights and moments.

    Under ZeRO-1 the 12 are divided among the ranks that have the same parameters. Gradients in 2 bytes are copied to
    fp32 for the step, each rank its part. fp32: 4, 4 and 8 bytes. ``versions``: of the weights (PipeDream-2BW §3.1: at
    most two); with two, what a rank's own optimizer steps with of the batch before is held while gradients of the next
    accumulate.
    """
    shards = (run.replicas, run.expert_replicas) if run.sharded_optimizer else (1, 1)
    of_state = 8 if run.precision == "fp32" else 12
    owned = parameters.shared / shards[0] + parameters.expert / shards[1]
    gradient = 4 if run.gradients_in_fp32 else 2
    return States(
        weights=versions * run.element_bytes * parameters.all,
        gradients=gradient * (parameters.all + (versions - 1) * owned),
        optimizer=of_state * owned,
        step=0 if run.gradients_in_fp32 else 4 * owned,
    )
