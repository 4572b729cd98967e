"""The memory of one process of a run: what it may use, and what it holds from batch to batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from evenpipe.runtime.resources import highest_of_all

__all__ = ["KeptBytes", "Room", "limit_bytes", "reachable_tensors", "static_bytes", "storage_bytes"]

#: Of a GPU's memory; the rest goes to CUDA, to communicators, to workspaces, and to gaps between tensors.
_FOR_TENSORS: Final = 0.9


class Room(NamedTuple):
    """The memory that a process may use, and what it holds of it besides activations and messages, in bytes."""

    limit_bytes: int
    static_bytes: int


class KeptBytes(NamedTuple):
    """Bytes that one process of a pipeline holds between two batches."""

    parameter_bytes: int
    weight_version_bytes: int
    held_gradient_bytes: int
    static_bytes: int
    message_bytes: int = 0


def limit_bytes(gib: float | None, device: torch.device) -> int:
    """`gib`, or, on a GPU, what the smallest one has for tensors; all ranks call it, and get the same."""
    if gib is not None:
        return int(gib * 2**30)
    _, total = torch.cuda.mem_get_info(device)
    return int(-highest_of_all([-_FOR_TENSORS * total], device)[0])


def static_bytes(tensors: Iterable[Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return bytes of `tensors`, and of the state that `optimizers` will make in their first step.

    That is, for parameters without a state, two averages of Adam's, or SGD's momentum.
    """
    to_come: int = sum(
        (2 if "betas" in group else int(bool(group.get("momentum")))) * parameter.nbytes
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not optimizer.state.get(parameter)
    )
    return storage_bytes(tensors) + to_come


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return bytes of the storages of `tensors`, of which a shared one counts once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values())


def reachable_tensors(roots: Iterable[Any], module: str, device: torch.device) -> Iterator[Tensor]:
    """The strided tensors on `device` that can be reached from `roots`, gradients and what is attached to tensors too.

    The way leads through collections, optimizers, and objects of classes that the Python module `module` defines.
    """
    known: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        thing = waiting.pop()
        if id(thing) in known:
            continue
        known[id(thing)] = thing
        if isinstance(thing, Tensor):
            if thing.device.type == device.type and thing.layout is torch.strided:
                yield thing
            waiting += [thing.grad] if thing.is_leaf else []
            waiting += vars(thing).values()
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, (list, tuple, set)):
            waiting += thing
        elif hasattr(thing, "param_groups") or type(thing).__module__ == module:
            waiting += vars(thing).values()
