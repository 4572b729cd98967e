"""Fully sharded replicas and offloaded activations: what moves beside a micro-batch's compute."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.planner.iteration import PartTime
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


def _kinds(parameters: Parameters, run: Run) -> Sequence[tuple[float, float, int, bool]]:
    """How many parameters, how many of them may be quantized, among how many ranks they are shared out, experts."""
    return (
        (parameters.shared, parameters.narrow, run.replicas, False),
        (parameters.expert, parameters.expert, run.expert_replicas, True),
    )


def _gathered(parameters: Parameters, run: Run, kernels: Kernels) -> float:
    narrow = run.quantization.gathered_bytes if run.quantization and run.quantized_parameters else None
    seconds = 0.0
    for count, quantized, ranks, experts in _kinds(parameters, run):
        nbytes = run.element_bytes * count
        if narrow is not None:
            nbytes += (narrow - run.element_bytes) * quantized
        seconds += kernels.links.reduction((ranks - 1) / ranks * nbytes, experts) if ranks > 1 else 0.0
    return seconds


def _reduced(parameters: Parameters, run: Run, kernels: Kernels) -> float:
    gradient = 4 if run.gradients_in_fp32 else 2
    return sum(
        kernels.links.reduction((ranks - 1) / ranks * gradient * count, experts)
        for count, _, ranks, experts in _kinds(parameters, run)
        if ranks > 1
    )
