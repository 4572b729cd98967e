"""What a process holds besides activations: weights, gradients, and what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["static_bytes"]


def static_bytes(chunks: Sequence[Any], optimizer: Any) -> int:
    """Bytes of the parameters, buffers and gradients of `chunks` (Megatron's DDP), and of the optimizer's tensors.

    `optimizer` is Megatron's. What Adam or SGD's momentum will make in their first step counts already.
    """
    inner = [
        part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer
    ]
    storages = {}
    for tensor in (*_of_model(chunks), *_of_optimizers(inner)):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) + sum(_still_to_come(one) for one in inner)


def _of_model(chunks: Iterable[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.module.buffers()
        for parameter in chunk.module.parameters():
            yield parameter.data
        # Flat, and padded: they take more than the gradients that lie in them.
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield from (data for data in (buffer.param_data, buffer.grad_data) if data is not None)


def _of_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _still_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Of parameters without a state so far: moments of their size and dtype."""
    stateless = [
        (parameter, 1 if group.get("momentum") else 2 if "betas" in group else 0)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not optimizer.state.get(parameter)
    ]
    return sum(moments * parameter.nbytes for parameter, moments in stateless)
