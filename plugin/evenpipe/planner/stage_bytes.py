"""Bytes of every stage from descriptions: weights, optimizer, saved activations of the verified schedule, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from evenpipe.descriptions import Device
from evenpipe.planner.operations.operation import Operation, Parameters, summed
from evenpipe.planner.operations.parts import Block, Blocks, Part, Recomputed
from evenpipe.planner.run import Recompute, Run
from evenpipe.schedule import Places

__all__ = [
    "ALLOCATOR_SLACK",
    "Chunk",
    "StageBytes",
    "States",
    "bytes_of_stage",
    "chunk_of",
    "chunks_of",
    "parameters_of",
    "slack",
    "stage_bytes",
    "stage_states",
    "states",
]


class States(NamedTuple):
    """Bytes that stay; ``step``: those that only the optimizer's step takes."""

    weights: float
    gradients: float
    optimizer: float
    step: float

    @property
    def stay(self) -> float:
        return self.weights + self.gradients + self.optimizer


#: Bytes a parameter that a rank steps, beside main gradients, where weights are kept quantized: fitted on the one
#: published peak that the step makes (70B on 32 H100 with t = 8, `benchmarks/published/recipes.yaml`).
_STEP_OF_QUANTIZED: Final = 2.8


def states(parameters: Parameters, run: Run, versions: int = 1, transposing: bool = False) -> States:
    """Mixed precision with Adam: parameters in 2 bytes, gradients in 2 or 4, and 12 bytes of fp32 weights and moments.

    Under ZeRO-1 the 12 are divided among the ranks that have the same parameters. Gradients in 2 bytes are copied to
    fp32 for the step, each rank its part. fp32: 4, 4 and 8 bytes. ``versions``: of the weights (PipeDream-2BW §3.1: at
    most two); with two, what a rank's own optimizer steps with of the batch before is held while gradients of the next
    accumulate. Quantized weights are kept beside the others, or instead of them; twice on devices ``transposing``.
    Muon and SGD have one moment, in fp32; Muon for matrices only, beside Adam for all else (``TensorParallelMuon``).
    What the host steps has its fp32 weights and moments there. ZeRO-2 divides gradients too, ZeRO-3 also weights.
    """
    shards = (run.replicas, run.expert_replicas) if run.sharded_optimizer else (1, 1)
    trained = parameters.trained if run.lora_rank else parameters
    copy = 0 if run.precision == "fp32" else 4
    adams, one = copy + 2 * run.moment_bytes, copy + 4
    of_matrix, of_other = {"adam": (adams, adams), "muon": (one, adams), "sgd": (one, one)}[run.optimizer]
    shared = of_matrix * trained.narrow + of_other * (trained.shared - trained.narrow)
    held = shared / shards[0] + of_matrix * trained.expert / shards[1]
    owned = trained.shared / shards[0] + trained.expert / shards[1]
    part = (parameters.shared / shards[0] + parameters.expert / shards[1]) / parameters.all if parameters.all else 1.0
    weights = run.element_bytes * parameters.all
    if run.quantization is not None:
        replaced = run.element_bytes if run.quantized_parameters else 0
        weights += (parameters.narrow + parameters.expert) * (run.quantization.weight_bytes(transposing) - replaced)
    stepped = 4 + (_STEP_OF_QUANTIZED if run.quantized_parameters else 0)
    # A correction of late gradients keeps a copy of the weights, or of what the rank's optimizer steps (docs/2bw.md).
    corrected = run.delay_correction if versions > 1 else "none"
    return States(
        weights=(part if run.shards_parameters else versions) * weights
        + run.element_bytes * trained.all * (corrected in ("weight-prediction", "nesterov")),
        gradients=run.gradient_bytes * (owned if run.shards_gradients else trained.all + (versions - 1) * owned),
        optimizer=(1 - run.optimizer_offload) * held + 4 * owned * (corrected == "error-feedback"),
        step=0 if run.gradients_in_fp32 else stepped * owned,
    )


#: What PyTorch's allocator reserves over what is allocated, of that which comes and goes. With recomputation, by BPipe
#: Table 7's verdicts, of which as many are right from 1.15 to 1.3; without, since 13B ran in 80 GB (Figure 3, Table 4).
ALLOCATOR_SLACK: Final[Mapping[Recompute, float]] = {"none": 1.1, "selective": 1.2, "full": 1.2}
#: The same with ``expandable_segments``: NVIDIA's runs of 2026 reserve 1.03 to 1.08 times what they allocate, with
#: experts that are chosen unevenly up to 1.21.
_EXPANDABLE_SLACK: Final = 1.08
_GIB: Final = 2**30


def slack(run: Run) -> float:
    """Return what the allocator reserves over what is allocated, of that which comes and goes."""
    return _EXPANDABLE_SLACK if run.expandable_segments else ALLOCATOR_SLACK[run.recompute]


class StageBytes(NamedTuple):
    """Bytes of one GPU of one stage at its peak.

    ``activations``: saved for backwards, own and accepted. ``buffers``: what the micro-batch that is computed takes,
    messages, the optimizer's step where that is more, and what the allocator does not give back.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    communicators: int

    @property
    def total(self) -> int:
        return sum(self)


class Chunk(NamedTuple):
    """A part of the pipeline on one GPU: parameters; bytes kept of a micro-batch, and those taken in its backward.

    ``left_bytes``: kept instead of ``kept_bytes`` between the halves of a split backward. ``attention_mask_bytes``: of
    those kept, what all of its layers share. ``offloaded_bytes``: that wait on the host, and are not among those kept.
    ``block``: the most parameters of a block.
    """

    parameters: Parameters
    kept_bytes: float
    left_bytes: float
    working_bytes: float
    attention_mask_bytes: float = 0.0
    offloaded_bytes: float = 0.0
    block: float = 0.0


def chunks_of(parts: Sequence[Part], blocks: Blocks) -> list[Chunk]:
    """One of each part, in the order of the model."""
    alone = {block: _alone(block, blocks) for block in {block for part in parts for block in part}}
    return [chunk_of((alone[block], count) for block, count in part.items()) for part in parts]


def _alone(block: Block, blocks: Blocks) -> Chunk:
    again, away, mask = blocks.recomputed(block), blocks.offloaded(block), blocks.attention_mask_bytes({block: 1})
    parameters = blocks.parameters[block]
    # Two layers' activations are on their way to the host or back.
    working = _working(blocks.operations[block], again) + 2 * away
    return Chunk(
        parameters, again.kept_bytes - away + mask, blocks.left_bytes[block], working, mask, away, parameters.all
    )


def chunk_of(each: Iterable[tuple[Chunk, int]]) -> Chunk:
    """Return a part that has so many of each of these blocks, whose layers share a mask."""
    each = list(each)
    mask = max((one.attention_mask_bytes for one, _ in each), default=0.0)
    return Chunk(
        summed(one.parameters.times(count) for one, count in each),
        sum((one.kept_bytes - one.attention_mask_bytes) * count for one, count in each) + mask,
        sum(one.left_bytes * count for one, count in each),
        max((one.working_bytes for one, _ in each), default=0.0),
        mask,
        sum(one.offloaded_bytes * count for one, count in each),
        max((one.block for one, _ in each), default=0.0),
    )


def parameters_of(part: Part, blocks: Blocks) -> Parameters:
    """Return the parameters that one GPU has of the part."""
    return summed(blocks.parameters[block].times(count) for block, count in part.items())


def _working(operations: Sequence[Operation], recomputed: Recomputed) -> float:
    """The most that the backward of a block takes beside what is kept: what is recomputed, until it has been used."""
    again = {id(one) for one in recomputed.regained}
    most = live = sum(one.saved_bytes for one in recomputed.regained)
    for one in reversed(operations):
        most = max(most, live + one.scratch_bytes)
        live -= one.saved_bytes if id(one) in again else 0
    return most


def stage_bytes(
    chunks: Sequence[Chunk],
    saved: Sequence[int],
    places: Places,
    versions: int,
    run: Run,
    message_bytes: float,
    devices: Sequence[Device],
) -> list[StageBytes]:
    """Return the bytes of every stage on its device.

    ``saved``: the schedule's peaks of saved activations, made of ``kept_bytes``.
    """
    found = []
    for stage, device in enumerate(devices):
        own = [chunks[places.position(stage, chunk)] for chunk in range(places.chunks)]
        held = stage_states(own, run, versions, device.transposing)
        kept = saved[stage] + _not_offloaded(own, saved[stage], stage, run)
        found.append(bytes_of_stage(own, held, kept, run, message_bytes, device))
    return found


def bytes_of_stage(
    own: Sequence[Chunk], held: States, kept: int, run: Run, message_bytes: float, device: Device
) -> StageBytes:
    """Return the bytes of a stage with these chunks, ``held`` all the time and ``kept`` at its peak."""
    # A hand-over's input and output, each with its gradient, whole where sequence parallelism divides them.
    working = max(chunk.working_bytes for chunk in own) + 2 * message_bytes + _in_flight(own, run)
    beside = max(slack(run) * (kept + working), held.step) - kept
    return StageBytes(
        weights=round(held.weights),
        gradients=round(held.gradients),
        optimizer=round(held.optimizer),
        activations=kept,
        buffers=round(beside),
        communicators=round(device.reserve_gib * _GIB),
    )


#: Parameters that Megatron-FSDP has on their way at least: gradients, and half as many that are gathered ahead.
_UNIT: Final = 1e9


def _in_flight(own: Sequence[Chunk], run: Run) -> float:
    """Return the bytes of weights and gradients that are whole for a while (``megatron_fsdp.py``)."""
    if run.sharding is None:
        return 0.0
    every, block = sum(chunk.parameters.all for chunk in own), max(chunk.block for chunk in own)
    weights = run.element_bytes * min(every, block + max(_UNIT / 2, block)) if run.shards_parameters else 0.0
    return weights + (run.gradient_bytes * min(every, max(_UNIT, 2 * block)) if run.shards_gradients else 0.0)


def _not_offloaded(own: Sequence[Chunk], saved: int, stage: int, run: Run) -> int:
    """Return what a later stage keeps, so that all have as much on the host; no more than it would have there."""
    if not run.offload_modules:
        return 0
    kept = sum(chunk.kept_bytes for chunk in own)
    away = sum(chunk.offloaded_bytes for chunk in own)
    return round(min(stage * run.offload_delta_bytes, saved / kept * away)) if away and kept else 0


def stage_states(own: Sequence[Chunk], run: Run, versions: int, transposing: bool) -> States:
    """Return the bytes that stay on a stage with these chunks, and those that only its step takes."""
    each = [states(chunk.parameters, run, versions, transposing) for chunk in own]
    return States(*map(sum, zip(*each, strict=True)))
