"""Why a run does not fit, by how much, and which flag to change."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.planner.descriptions import Device
from evenpipe.planner.memory.stages import StageBytes
from evenpipe.planner.run import Run

__all__ = ["reason_of"]

_GIB = 2**30


def reason_of(held: Sequence[StageBytes], device: Device, run: Run) -> str | None:
    """One line, or None if all stages fit."""
    most = max(range(len(held)), key=lambda stage: held[stage].total)
    need, have = held[most].total / _GIB, device.memory_gib
    if need <= have:
        return None
    return (
        f"stage {most} needs {need:.1f} GiB and has {have:.1f}: {need - have:.1f} too few, of them {_largest(held[most])}: "
        f"{remedy(held, most, run)}"
    )


def _largest(stage: StageBytes) -> str:
    name, nbytes = max(stage._asdict().items(), key=lambda item: item[1])
    return f"{nbytes / _GIB:.1f} GiB of {name}"


def remedy(held: Sequence[StageBytes], most: int, run: Run) -> str:
    """The flag that changes most of what is too much."""
    stage = held[most]
    states = stage.weights + stage.gradients + stage.optimizer
    if states > stage.activations + stage.buffers:
        sharded = "" if run.sharded_optimizer or run.data == 1 else "shard the optimizer (--sharded-optimizer), or "
        return f"{sharded}give more --stages or --tensor-parallel"
    least = min(one.total for one in held)
    if run.stages >= 4 and not run.bpipe and run.schedule == "1f1b" and least < stage.total * 0.8:
        return "level the stages with --bpipe, or give --recompute " + (
            "full" if run.recompute != "none" else "selective"
        )
    if run.recompute != "full":
        return f"give --recompute {'selective' if run.recompute == 'none' and run.attention == 'unfused' else 'full'}"
    if run.micro_batch > 1:
        return "give a smaller --micro-batch-size"
    return "give more --stages or --tensor-parallel"
