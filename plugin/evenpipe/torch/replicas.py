"""Pipelines side by side: which process is which stage of which replica."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from evenpipe.runtime.heartbeat import job_timeout

__all__ = ["Groups", "groups_of"]


class Groups(NamedTuple):
    """The group of this process' pipeline, that of the replicas with the same stage, and its number in each."""

    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup
    stage: int
    replica: int


def groups_of(stages: int) -> Groups:
    """Return this process' groups, with all processes shared out to pipelines of so many stages; all call it.

    The replicas of a stage have ranks in succession, as in Megatron, so that gradients are reduced inside a node and
    only messages between stages leave it: rank = stage × replicas + replica. Raises ValueError.
    """
    world = dist.get_world_size()
    if stages < 1 or world % stages:
        raise ValueError(f"stages: {world} processes cannot be shared out to pipelines of {stages} stages")
    width, limit = world // stages, job_timeout()
    make: Any = dist.new_subgroups_by_enumeration
    replicas, _ = make([[stage * width + one for one in range(width)] for stage in range(stages)], timeout=limit)
    pipeline, _ = make([[stage * width + one for stage in range(stages)] for one in range(width)], timeout=limit)
    return Groups(pipeline, replicas, *divmod(dist.get_rank(), width))
