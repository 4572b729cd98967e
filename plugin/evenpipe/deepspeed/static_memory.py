"""What a process holds from batch to batch beside activations."""

from __future__ import annotations

from typing import Any

import torch

from evenpipe.tuner import process_memory

__all__ = ["static_bytes"]


def static_bytes(engine: Any) -> int:
    """Return bytes of weights, gradients and all tensors of DeepSpeed's optimizer.

    Each kind of optimizer keeps flat buffers, shards and fp32 copies under names of its own, so whatever can be reached
    is counted. What there is not between batches, or not yet, counts too: gradients, and the state that a first step
    makes.
    """
    module: torch.nn.Module = engine.module
    optimizer: Any = engine.optimizer
    roots = [*module.parameters(), *module.buffers(), optimizer]
    held = process_memory.reachable_tensors(roots, type(optimizer).__module__, engine.device)
    gradients = sum(one.nbytes for one in module.parameters() if one.requires_grad and one.grad is None)
    return process_memory.static_bytes(held, [getattr(optimizer, "optimizer", optimizer)]) + gradients
