"""Advice on a run, one line each: why it does not fit, what makes it slow, and which flag to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from evenpipe.descriptions import Cluster, Device, Model
from evenpipe.planner.operations.layer import softmax_is_fused
from evenpipe.planner.operations.operation import Shard
from evenpipe.planner.run import Run
from evenpipe.planner.stage_bytes import StageBytes

__all__ = ["reason_of", "warnings_of"]

_GIB: Final = 2**30


def _free(held: Sequence[StageBytes], devices: Sequence[Device]) -> list[float]:
    """Return the GiB that each stage has left."""
    return [device.memory_gib - stage.total / _GIB for stage, device in zip(held, devices, strict=True)]


def reason_of(held: Sequence[StageBytes], devices: Sequence[Device], run: Run) -> str | None:
    """One line, or None if all stages fit."""
    free = _free(held, devices)
    most = free.index(min(free))
    device = devices[most]
    need, have = held[most].total / _GIB, device.memory_gib
    if need <= have:
        return None
    name, nbytes = max(held[most]._asdict().items(), key=lambda item: int(item[1]))
    return (
        f"stage {most} needs {need:.1f} GiB and has {have:.1f}: {need - have:.1f} too few; {nbytes / _GIB:.1f} GiB are "
        f"{name}: {_remedy(held, most, device, run)}"
    )


def _remedy(held: Sequence[StageBytes], most: int, device: Device, run: Run) -> str:
    """Return the flag that changes most of what is too much."""
    stage = held[most]
    if stage.weights + stage.gradients + stage.optimizer + stage.communicators > device.memory_gib * _GIB:
        sharded = "" if run.sharded_optimizer or run.data == 1 else "shard the optimizer (--sharded-optimizer), or "
        return f"{sharded}give more --stages or --tensor-parallel"
    scope = "selective" if run.recompute == "none" and run.attention == "unfused" else "full"
    level = sum(one.total for one in held) / len(held) < device.memory_gib * _GIB
    if run.can_be_levelled and level:
        return f"level the stages with --bpipe{'' if run.recompute == 'full' else f', or give --recompute {scope}'}"
    if run.recompute != "full":
        return f"give --recompute {scope}"
    return "give a smaller --micro-batch-size" if run.micro_batch > 1 else "give more --stages or --tensor-parallel"


#: From here on what comes and goes with a micro-batch is "high memory pressure": BPipe's rows that PyTorch slowed down
#: by emptying its cache (Appendix B) take 2.7 to 5.4 GiB of 80.
_COMES_AND_GOES: Final = 0.03
_NEAR: Final = 0.05  # of the memory: BPipe ran with 3 GiB to spare of 80, and not with less
_APART: Final = 0.25  # fullest stage over the emptiest; 1F1B without recomputation is at 1.3 to 2
_SLOWEST: Final = 1.05  # slowest stage over the median: a twentieth of a pipeline's time


def warnings_of(
    model: Model,
    cluster: Cluster,
    run: Run,
    held: Sequence[StageBytes],
    devices: Sequence[Device],
    times_ms: Sequence[tuple[float, float]],
    working_bytes: float,
    eviction_ms: float,
) -> list[str]:
    """``devices``, ``times_ms``: of each stage its smallest, and its forward and backward; ``working_bytes``: what the
    backward of a micro-batch takes.
    """
    found = [
        *([f"left out of the model's description: {', '.join(model.left_out)}"] if model.left_out else []),
        *_unfused(model, run),
        *_pressure(devices, run, held, working_bytes),
        *_above(cluster, run, held),
        *_slowest(run, times_ms),
        *_evictions(cluster, run, times_ms, eviction_ms),
    ]
    if run.micro_batches < run.stages and run.schedule != "2bw":
        found.append(
            f"bubble: {run.micro_batches} micro-batches do not fill {run.stages} stages: give a larger "
            "--global-batch-size, or smaller micro-batches"
        )
    return found


def _unfused(model: Model, run: Run) -> Iterator[str]:
    if run.attention != "unfused" or softmax_is_fused(Shard(model, run)):
        return
    rows = run.micro_batch * model.heads // run.tensor
    better = next((b for b in (2, 4) if run.micro_batch * b * model.heads // run.tensor % 4 == 0), None)
    fused = f"with --micro-batch-size {run.micro_batch * better} it would be, or " if rows % 4 and better else ""
    yield (
        f"unfused softmax: Megatron's fused kernel takes micro-batch × heads / tensor only in multiples of 4, in half "
        f"precision and up to 16,384 tokens; here it is {rows} in {run.precision}, not fused: "
        f"{fused}give --attention flash"
    )


def _pressure(devices: Sequence[Device], run: Run, held: Sequence[StageBytes], working_bytes: float) -> Iterator[str]:
    free = _free(held, devices)
    at = free.index(min(free))
    have, most = devices[at].memory_gib, held[at].total / _GIB
    segments = "" if run.expandable_segments else "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or "
    if have * (1 - _NEAR) < most <= have:
        yield (
            f"memory pressure: {have - most:.1f} of {have:.1f} GiB are left, which fragments may take: {segments}"
            "recompute more"
        )
    smaller = f"give a smaller --micro-batch-size than {run.micro_batch}" if run.micro_batch > 1 else "recompute more"
    if working_bytes / _GIB > _COMES_AND_GOES * have and not run.expandable_segments:
        yield (
            f"memory pressure: {working_bytes / _GIB:.1f} GiB come and go with each micro-batch's backward; PyTorch "
            f"may empty its cache again and again, and take a third longer: {segments}{smaller}"
        )


def _above(cluster: Cluster, run: Run, held: Sequence[StageBytes]) -> Iterator[str]:
    order = sorted(range(len(held)), key=lambda stage: held[stage].total)
    least, most = held[order[0]], held[order[-1]]
    if most.total > least.total * (1 + _APART):
        of_activations = most.activations - least.activations > (most.total - least.total) / 2
        levels = of_activations and run.can_be_levelled
        if cluster.groups and not levels:
            return  # the same layers on each would wait for the slower nodes
        remedy = "--bpipe levels them" if levels else "even them out with --layout"
        apart = (most.total - least.total) / _GIB
        yield f"memory: stage {order[-1]} needs {apart:.1f} GiB more than stage {order[0]}: {remedy}"


def _slowest(run: Run, times_ms: Sequence[tuple[float, float]]) -> Iterator[str]:
    each = [sum(times) for times in times_ms]
    usual, slowest = median(one for one in each if one), max(each)  # a stage may have no layer at all
    if slowest > _SLOWEST * usual:
        stage = each.index(slowest)
        yield (
            f"time: stage {stage} computes {slowest / usual - 1:.0%} longer than the others, which wait for it: give "
            "it fewer layers with --layout"
        )


def _evictions(
    cluster: Cluster, run: Run, times_ms: Sequence[tuple[float, float]], eviction_ms: float
) -> Iterator[str]:
    if not run.bpipe or 2 * run.together <= cluster.gpus_per_node:
        return
    forward, backward = (max(column) for column in zip(*times_ms, strict=True))
    enough = "more" if 2 * eviction_ms > forward + backward else "less"
    yield (
        f"evictions: partner stages are on different nodes; one takes {eviction_ms:.0f} ms there and as long back, "
        f"{enough} than the {forward + backward:.0f} ms that a forward and a backward have for both: give a smaller "
        "--tensor-parallel, or recompute more"
    )
