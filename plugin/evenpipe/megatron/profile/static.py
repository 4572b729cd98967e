"""What stays from batch to batch: parameters, gradient buffers, and what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from megatron.core.optimizer import MegatronOptimizer

from evenpipe.megatron.trainer.models import Replica
from evenpipe.megatron.trainer.options import TrainOptions

__all__ = ["static_bytes"]


def static_bytes(replica: Replica, optimizer: MegatronOptimizer, options: TrainOptions) -> int:
    """Of this process, once the optimizer has stepped. Shared storages count once."""
    stepped = list(_stepped(optimizer))
    held = chain(
        *(chunk.parameters() for chunk in replica.chunks),
        _flat_buffers(replica),
        stepped,
    )
    # Adam keeps two averages for each of what it steps, SGD one if it has a momentum.
    averages = 2 if options.optimizer == "adam" else int(options.momentum > 0)
    return _bytes(held) + averages * sum(parameter.nbytes for parameter in stepped)


def _stepped(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """What the optimizer itself is given: parameters, or fp32 copies of them, or its share of either."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _flat_buffers(replica: Replica) -> Iterator[torch.Tensor]:
    for chunk in replica.chunks:
        for buffer in chunk.buffers:
            yield buffer.grad_data
            if buffer.param_data is not None:
                yield buffer.param_data


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values())
