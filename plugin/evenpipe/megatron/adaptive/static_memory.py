"""What a process holds from batch to batch: weights, gradients, and what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from evenpipe.tuner.optimizer_state import bytes_to_come

__all__ = ["static_bytes"]


def static_bytes(chunks: Sequence[Any], optimizer: Any) -> int:
    """Bytes of parameters, buffers and gradients of `chunks` (Megatron's DDP), and of its `optimizer`'s tensors.

    What Adam or SGD's momentum will make in their first step counts already; shared storages count once.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [part.optimizer for part in parts if not part.is_stub_optimizer]
    storages = {}
    for tensor in (*_of_model(chunks), *_of_optimizers(inner)):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values()) + sum(map(bytes_to_come, inner))


def _of_model(chunks: Iterable[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.module.buffers()
        yield from chunk.module.parameters()
        # Flat, and padded: they take more than the gradients that lie in them.
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield from (data for data in (buffer.param_data, buffer.grad_data) if data is not None)


def _of_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """What they are given, which may be fp32 copies or this process' share, and what they have made of it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            # Counters of steps are numbers, in tensors of no dimension.
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())
