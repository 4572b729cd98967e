"""The best layout, from the flags alone: a child process parses them and times one layer of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from evenpipe.partition.layouts import (
    LayoutError,
    LayoutPlan,
    Pipeline,
    Shape,
    Time,
    kinds,
    layers_of,
    plan_layout,
    profile_of,
    roofline,
)
from evenpipe.partition.profile import Profile
from evenpipe.planner.descriptions import Device
from evenpipe.runtime.processes import ChildFailed, answer_of

__all__ = ["best_layout"]

_CHILD: Final = "evenpipe.megatron.layout_model"


def best_layout(
    flags: Sequence[str],
    device: Device | None = None,
    *,
    world_size: int | None = None,
    limit_bytes: int | None = None,
    half_layers: bool = False,
    recompute: bool = False,
) -> tuple[LayoutPlan, Profile]:
    """For the flags of pretrain_gpt.py, which its path may precede: a checkout's own parser then reads them.

    Times are `device`'s peaks; None: measured on this CPU, one layer of each kind. `world_size`: GPUs of the whole run,
    for the share of a distributed optimizer; None: as few as can be. `limit_bytes`: of memory, for each stage.
    `half_layers`: a stage may end between a layer's attention and MLP, and `recompute`: each computes as many layers
    again as it needs to fit; either takes `--evenpipe-partition` to run.
    The profile lists every node that was timed. Megatron is not touched in the calling process.

    Raises LayoutError, one line.
    """
    asked = {"flags": list(flags), "world_size": world_size, "measure": device is None}
    try:
        found = answer_of(_CHILD, asked)
    except ChildFailed as error:
        raise LayoutError(str(error)) from error
    shape = Shape(**{**found["shape"], "experts": tuple(found["shape"]["experts"])})
    if recompute and shape.recompute is not None:
        raise LayoutError(
            f"--recompute-granularity {shape.recompute}: the plan says what each stage computes again: leave it out"
        )
    if device is None:
        times = {kind: {name: Time(*time) for name, time in nodes.items()} for kind, nodes in found["times"].items()}
    else:
        times = {kind: roofline(shape, kind, device) for kind in kinds(shape)}
    where = "cpu" if device is None else device.name
    profile = profile_of(shape, times, device=where, versions={"megatron-core": found["version"]})
    plan = plan_layout(
        layers_of(shape, times, half_layers),
        Pipeline(*found["pipeline"]),
        mtp_apart=found["mtp_apart"],
        source=profile.origin.source,
        limit_bytes=limit_bytes,
        recompute=recompute,
        shape=shape,
    )
    return plan, profile
