"""The best layout, from the flags alone: a child process parses them and times one layer of each kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from evenpipe.partition.timing.devices import Device

__all__ = ["best_layout"]

_CHILD: Final = "evenpipe.megatron.layouts.model"
_WITHOUT_GPU: Final = {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def best_layout(
    flags: Sequence[str],
    device: Device | None = None,
    *,
    world_size: int | None = None,
    limit_bytes: int | None = None,
) -> tuple[LayoutPlan, Profile]:
    """For the flags of pretrain_gpt.py, which its path may precede: a checkout's own parser then reads them.

    Times are `device`'s peaks; None: measured on this CPU, one layer of each kind. `world_size`: GPUs of the whole run,
    for the share of a distributed optimizer; None: as few as can be. `limit_bytes`: of memory, for each stage.
    The profile lists every node that was timed. Megatron is not touched in the calling process.

    Raises LayoutError, one line.
    """
    asked = {"flags": list(flags), "world_size": world_size, "measure": device is None}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", _CHILD],
        input=json.dumps(asked),
        env={**os.environ, **_WITHOUT_GPU},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise LayoutError(lines[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    shape = Shape(**{**found["shape"], "experts": tuple(found["shape"]["experts"])})
    if device is None:
        times = {kind: {name: Time(*time) for name, time in nodes.items()} for kind, nodes in found["times"].items()}
    else:
        times = {kind: roofline(shape, kind, device) for kind in kinds(shape)}
    where = "cpu" if device is None else device.name
    profile = profile_of(shape, times, device=where, versions={"megatron-core": found["version"]})
    plan = plan_layout(
        layers_of(shape, times),
        Pipeline(*found["pipeline"]),
        mtp_apart=found["mtp_apart"],
        source=profile.origin.source,
        limit_bytes=limit_bytes,
    )
    return plan, profile
