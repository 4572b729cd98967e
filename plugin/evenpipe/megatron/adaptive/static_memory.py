"""What a process holds from batch to batch: weights, gradients, what the optimizer keeps, and Megatron's workspace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from evenpipe.tuner import process_memory

__all__ = ["static_bytes", "workspace_bytes"]


def static_bytes(chunks: Sequence[Any], optimizer: Any) -> int:
    """Return bytes of parameters, buffers and gradients of `chunks` (Megatron's DDP), and of its `optimizer`'s tensors.

    What Adam or SGD's momentum will make in their first step counts already; shared storages count once.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [part.optimizer for part in parts if not part.is_stub_optimizer]
    return process_memory.static_bytes(_tensors(chunks, inner), inner)


def workspace_bytes() -> int:
    """Return bytes that Megatron keeps for its largest attention scores so far."""
    return sum(tensor.nbytes for tensor in parallel_state.get_global_memory_buffer().buffer.values())


def _tensors(chunks: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.module.buffers()
        yield from chunk.module.parameters()
        # Flat, and padded: they take more than the gradients that lie in them.
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield from (data for data in (buffer.param_data, buffer.grad_data) if data is not None)
    # What they are given, which may be fp32 copies or this process' share, and what they have made of it.
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            # Counters of steps are numbers, in tensors of no dimension.
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())
