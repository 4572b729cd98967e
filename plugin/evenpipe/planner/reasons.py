"""Why a run does not fit, by how much, and which flag to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from evenpipe.planner.descriptions import Device
from evenpipe.planner.memory.stages import StageBytes
from evenpipe.planner.run import Run

__all__ = ["reason_of"]

_GIB: Final = 2**30


def reason_of(held: Sequence[StageBytes], device: Device, run: Run) -> str | None:
    """One line, or None if all stages fit."""
    most = max(range(len(held)), key=lambda stage: held[stage].total)
    need, have = held[most].total / _GIB, device.memory_gib
    if need <= have:
        return None
    name, nbytes = max(held[most]._asdict().items(), key=lambda item: int(item[1]))
    return (
        f"stage {most} needs {need:.1f} GiB and has {have:.1f}: {need - have:.1f} too few; {nbytes / _GIB:.1f} GiB are "
        f"{name}: {_remedy(held, most, device, run)}"
    )


def _remedy(held: Sequence[StageBytes], most: int, device: Device, run: Run) -> str:
    """The flag that changes most of what is too much."""
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
