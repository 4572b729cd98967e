"""Muon's Newton–Schulz products: what its step computes beside an optimizer that works on each element alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from evenpipe.planner.kernels import Kernels
from evenpipe.planner.operations.operation import Gemm, Operation
from evenpipe.planner.operations.parts import Blocks, Part
from evenpipe.planner.run import Run

__all__ = ["orthogonalized"]

_STEPS: Final = 5  # Megatron's --muon-num-ns-steps


def orthogonalized(parts: Iterable[Part], blocks: Blocks, run: Run, kernels: Kernels) -> float:
    """Return the seconds in which one GPU orthogonalizes the momentum of these parts' matrices (Jordan et al. 2024).

    Each is a matrix of its own, as this rank has it (``--muon-tp-mode blockwise``), in bf16 (medium precision). Shared
    out among replicas, whole ones go round: a rank has the mean, or the largest alone.
    """
    shards = (run.replicas, run.expert_replicas) if run.sharded_optimizer else (1, 1)
    seconds, largest = 0.0, 0.0
    for part in parts:
        for block, count in part.items():
            for one in blocks.operations[block]:
                for number, each in _matrices(one, kernels):
                    seconds += count * number * each / shards[one.parameters.expert > 0]
                    largest = max(largest, each)
    return max(seconds, largest)


def _matrices(of: Operation, kernels: Kernels) -> Iterator[tuple[float, float]]:
    """Yield how many matrices of a shape an operation has, and the seconds of one of them.

    A step of X = aX + (b XXᵀ + c (XXᵀ)²) X has three products, on the matrix's narrow side.
    """
    if not (of.parameters.narrow or of.parameters.expert):
        return
    for made in of.weight_gradient:
        if isinstance(made, Gemm):
            rows, columns = sorted((made.m, made.n))
            step = (Gemm(rows, rows, columns), Gemm(rows, rows, rows), Gemm(rows, columns, rows))
            yield made.batch, _STEPS * kernels.seconds(step)
