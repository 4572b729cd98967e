"""What of Megatron's lies in the memory of the parameters, and goes with their versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from evenpipe.runtime.weight_versions import Alias, WeightVersions

__all__ = ["forget_shards", "weight_versions"]


def weight_versions(model: Sequence[Any], optimizers: Sequence[Any], parameters: Sequence[Tensor]) -> WeightVersions:
    """Two versions of `parameters`, and of all that Megatron's buffers and optimizers see of their memory."""
    shards = [
        tensor
        for one in optimizers
        for name in ("shard_float16_groups", "shard_fp32_groups")
        for group in getattr(one, name, None) or ()
        for tensor in group
    ]
    stepped = [tensor for one in optimizers for tensor in one.get_parameters()]
    buffers = [buffer for chunk in model for buffer in chunk.buffers]
    aliases = [Alias(owner, "param_data") for buffer in buffers for owner in (buffer, *buffer.buckets)]
    return WeightVersions(parameters, [*shards, *stepped], aliases)


def forget_shards(model: Sequence[Any]) -> None:
    """Have Megatron's buckets look again where their parameters are, of which each rank gathers the others' shards."""
    for chunk in model:
        for group in chunk.bucket_groups:
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
