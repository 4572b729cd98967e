"""Which node allocates which storage, which read it, and whose backward needs it, for one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from evenpipe.partition.counting.hooks import on_saved
from evenpipe.partition.counting.kernels import kernels_of
from evenpipe.partition.profile import Parameter, Storage
from evenpipe.partition.trace import Graph, StorageNumbers

__all__ = ["Memory", "count_memory"]

# Adam keeps two moments of each element in fp32, and of a half-precision parameter an fp32 copy, which it updates.
_MOMENT_BYTES: Final = 2 * 4
_MASTER_BYTES: Final = 4

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Memory:
    """Storages in the order of their allocation, and parameters in that of their first use.

    Buffers count as parameters without gradient or optimizer state. `outputs`: the bytes of the tensors that each
    node returns.
    """

    storages: tuple[Storage, ...]
    parameters: tuple[Parameter, ...]
    outputs: tuple[int, ...]


@dataclass
class _Found:
    nbytes: int
    producer: int
    users: list[int] = field(default_factory=list)
    savers: list[int] = field(default_factory=list)
    changers: list[int] = field(default_factory=list)


def count_memory(graph: Graph, device_type: str, progress: Progress = lambda done, total: None) -> Memory:
    """Runs the graph once, weightless, and notes what autograd saves (C.1), each storage once.

    `device_type`: "cpu" or "cuda", whose kernels to count. The gradient of a parameter has its type, the optimizer is
    Adam. `progress(done, total)` is called after each node.
    """
    numbers = StorageNumbers()
    resident = _resident(graph, numbers)
    kernels = kernels_of(device_type)
    index = {node: number for number, node in enumerate(graph.nodes)}
    found: dict[int, _Found] = {}
    outputs: list[int] = []

    def note(tensor: Tensor, producer: int) -> _Found | None:
        number = numbers.of(tensor)
        if number in resident:
            return None
        return found.setdefault(number, _Found(tensor.untyped_storage().nbytes(), producer))

    def call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = index.get(node, -1)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            note(tensor, -1)  # an input of the model, when it is first read

        def saved(tensor: Tensor) -> None:
            if (storage := note(tensor, place)) is not None:
                _add(storage.savers, place)

        versions = [tensor._version for tensor in given]
        with on_saved(saved):
            result = kernels(node)(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            note(tensor, place)
        if place >= 0:
            for tensor, version in zip(given, versions, strict=True):
                if (storage := note(tensor, -1)) is not None and storage.producer != place:
                    _add(storage.users, place)
                    if tensor._version != version:
                        _add(storage.changers, place)
            outputs.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
            progress(place + 1, len(graph.nodes))
        return result

    graph.evaluate(call)
    storages = [it for it in found.values() if it.producer >= 0 or it.users or it.savers]
    return Memory(
        storages=tuple(
            Storage(
                nbytes=it.nbytes,
                producer=it.producer,
                users=tuple(it.users),
                savers=tuple(it.savers),
                changers=tuple(it.changers),
            )
            for it in sorted(storages, key=lambda it: it.producer)
        ),
        parameters=_parameters(graph, numbers),
        outputs=tuple(outputs),
    )


def _add(places: list[int], place: int) -> None:
    """Keeps places ascending and single; nodes come in their order."""
    if not places or places[-1] != place:
        places.append(place)


def _resident(graph: Graph, numbers: StorageNumbers) -> set[int]:
    """Storages of parameters, buffers and constants, which are there whatever the micro-batch."""
    held = [_held(graph, node) for node in graph.module.graph.nodes if node.op == "get_attr"]
    return {numbers.of(tensor) for tensor in held if isinstance(tensor, Tensor)}


def _held(graph: Graph, node: fx.Node) -> Any:
    value: Any = graph.module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return graph.held(value)


def _parameters(graph: Graph, numbers: StorageNumbers) -> tuple[Parameter, ...]:
    """Each once, though it have several names (tied weights)."""
    index = {node: number for number, node in enumerate(graph.nodes)}
    tensors: dict[int, tuple[str, Tensor]] = {}
    users: dict[int, set[int]] = {}
    for node in graph.module.graph.nodes:
        if node.op == "get_attr" and isinstance(tensor := _held(graph, node), Tensor):
            number = numbers.of(tensor)
            tensors.setdefault(number, (str(node.target), tensor))
            users.setdefault(number, set()).update(index[user] for user in node.users if user in index)
    parameters = []
    for number, (name, tensor) in sorted(tensors.items(), key=lambda item: min(users[item[0]], default=0)):
        trained = tensor.requires_grad
        nbytes = tensor.untyped_storage().nbytes()
        state = _MOMENT_BYTES + (_MASTER_BYTES if tensor.element_size() < 4 else 0)
        if users[number]:
            parameters.append(
                Parameter(
                    name=name,
                    nbytes=nbytes,
                    gradient_bytes=nbytes if trained else 0,
                    optimizer_bytes=tensor.numel() * state if trained else 0,
                    users=tuple(sorted(users[number])),
                )
            )
    return tuple(parameters)
