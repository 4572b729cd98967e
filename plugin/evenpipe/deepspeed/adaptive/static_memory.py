"""What a process holds from batch to batch: weights, gradients, and what the optimizer keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenpipe.tuner.optimizer_state import bytes_to_come

__all__ = ["static_bytes"]


def static_bytes(module: torch.nn.Module, optimizer: Any, device: torch.device) -> int:
    """Bytes on `device` of all tensors of `module` and of DeepSpeed's `optimizer`, with what is attached to them.

    Each kind of optimizer keeps flat buffers, shards and fp32 copies under names of its own, so whatever can be reached
    is counted; shared storages count once. What there is not between batches, or not yet, counts too: gradients, and
    the state that a first step makes.
    """
    storages = {}
    known: dict[int, Any] = {}
    waiting: list[Any] = [*module.parameters(), *module.buffers(), optimizer]
    while waiting:
        thing = waiting.pop()
        if id(thing) in known:
            continue
        known[id(thing)] = thing
        if isinstance(thing, Tensor):
            if thing.device.type == device.type and thing.layout is torch.strided:
                storage = thing.untyped_storage()
                storages[storage._cdata] = storage
            waiting += [thing.grad] if thing.is_leaf else []
            waiting += vars(thing).values()
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, (list, tuple, set)):
            waiting += thing
        elif hasattr(thing, "param_groups") or type(thing).__module__ == type(optimizer).__module__:
            waiting += vars(thing).values()
    to_come = bytes_to_come(getattr(optimizer, "optimizer", optimizer))
    gradients = sum(one.nbytes for one in module.parameters() if one.requires_grad and one.grad is None)
    return sum(storage.nbytes() for storage in storages.values()) + to_come + gradients
