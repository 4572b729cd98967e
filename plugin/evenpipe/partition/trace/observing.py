"""What each node of a graph reads, makes and changes, seen by running it once on weightless tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from evenpipe.partition.trace.drawing import draws_within

__all__ = ["Evaluate", "Observed", "StorageNumbers", "Value", "evaluate", "observe"]


class Value(NamedTuple):
    """A tensor that a node returns: the number of its storage, shape, type, and its bytes when sent."""

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    requires_grad: bool


class Observed(NamedTuple):
    """One node. `values`: what it returns; `tensor`: that is one tensor, and nothing else.

    `reads` and `changes`: the storages of its arguments, and those among them that it writes to in place.
    `random`: it draws random numbers.
    """

    values: tuple[Value, ...]
    tensor: bool
    reads: frozenset[int]
    changes: frozenset[int]
    random: bool


class StorageNumbers:
    """Numbers storages in the order in which they are first seen, and keeps them, so that none is mistaken."""

    def __init__(self) -> None:
        self._numbers: dict[StorageWeakRef, int] = {}
        self._kept: list[Any] = []

    def of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if reference not in self._numbers:
            self._numbers[reference] = len(self._numbers)
            self._kept.append(storage)
        return self._numbers[reference]

    def __len__(self) -> int:
        return len(self._numbers)


Evaluate = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]


def evaluate(
    graph_module: fx.GraphModule,
    inputs: Mapping[str, Tensor],
    call: Evaluate,
    held: Callable[[Any], Any],
) -> dict[fx.Node, Any]:
    """Goes through the graph in its order; `call(node, args, kwargs)` gives what an operation returns.

    `held` gives what to take for a parameter, a buffer or a constant of the module.
    """
    env: dict[fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            env[node] = inputs[node.target]
        elif node.op == "get_attr":
            env[node] = held(operator.attrgetter(node.target)(graph_module))
        elif node.op == "call_function":
            args = fx.map_arg(node.args, env.__getitem__)
            kwargs = fx.map_arg(node.kwargs, env.__getitem__)
            env[node] = call(node, args, kwargs)
    return env


def observe(
    graph_module: fx.GraphModule, inputs: Mapping[str, Tensor], held: Callable[[Any], Any]
) -> dict[fx.Node, Observed]:
    """Every node's behaviour; storages that two nodes share have one number."""
    numbers = StorageNumbers()
    seen: dict[fx.Node, Observed] = {}

    def call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in given]
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        changed = [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
        # Taking one of several results out reads nothing of its memory.
        reads = () if node.target is operator.getitem else map(numbers.of, given)
        seen[node] = Observed(
            values=_values(result, numbers),
            tensor=isinstance(result, Tensor),
            reads=frozenset(reads),
            changes=frozenset(map(numbers.of, changed)),
            random=draws_within(node.target, args, kwargs),
        )
        return result

    with torch.enable_grad():
        env = evaluate(graph_module, inputs, call, held)
    for node, value in env.items():
        if node not in seen:
            seen[node] = Observed(_values(value, numbers), isinstance(value, Tensor), frozenset(), frozenset(), False)
    return seen


def _values(result: object, numbers: StorageNumbers) -> tuple[Value, ...]:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return tuple(
        Value(numbers.of(t), tuple(t.shape), t.dtype, t.numel() * t.element_size(), t.requires_grad) for t in tensors
    )
