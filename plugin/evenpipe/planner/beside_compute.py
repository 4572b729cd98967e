"""Fully sharded replicas and offloaded activations: what moves beside a micro-batch's compute."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.planner.iteration import PartTime, kinds_of
from evenpipe.planner.kernels import Kernels
from evenpipe.planner.operations.operation import Parameters
from evenpipe.planner.run import Run
from evenpipe.planner.stage_bytes import Chunk

__all__ = ["beside_moves"]


def beside_moves(times: Sequence[PartTime], chunks: Sequence[Chunk], run: Run, kernels: Kernels) -> list[PartTime]:
    """Return the seconds of each part with what is not hidden of its moves, which travel beside all of its compute."""
    found = []
    for time, chunk in zip(times, chunks, strict=True):
        gathered = _gathered(chunk.parameters, run, kernels) if run.shards_parameters else 0.0
        own = chunk.parameters.trained if run.lora_rank else chunk.parameters
        reduced = _reduced(own, run, kernels) if run.shards_gradients else 0.0
        copied = kernels.copied_to_host(chunk.offloaded_bytes)
        forward = _with(time.forward, gathered, bool(run.overlap_parameters))
        backward = _with(time.backward, gathered, bool(run.overlap_parameters))
        backward = _with(backward, reduced, bool(run.overlap_gradients))
        found.append(time._replace(forward=max(forward, copied), backward=max(backward, copied)))
    return found


def _with(compute: float, moves: float, beside: bool) -> float:
    return max(compute, moves) if beside else compute + moves


def _gathered(parameters: Parameters, run: Run, kernels: Kernels) -> float:
    narrow = run.quantization.gathered_bytes if run.quantization and run.quantized_parameters else None
    saved = 0.0 if narrow is None else run.element_bytes - narrow
    return sum(
        kernels.links.reduction((ranks - 1) / ranks * (run.element_bytes * count - saved * quantized), experts)
        for count, quantized, ranks, experts in kinds_of(parameters, run)
    )


def _reduced(parameters: Parameters, run: Run, kernels: Kernels) -> float:
    return sum(
        kernels.links.reduction((ranks - 1) / ranks * run.gradient_bytes * count, experts)
        for count, _, ranks, experts in kinds_of(parameters, run)
    )
