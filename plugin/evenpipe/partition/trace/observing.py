"""What each node of a graph reads, makes, changes and draws, seen by running it once on weightless tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

__all__ = ["Evaluate", "Observed", "StorageNumbers", "Value", "evaluate", "is_random", "number_draws", "observe"]

#: An operation with one of these arguments draws nothing where it is zero or false.
_SWITCHES: Final = ("dropout_p", "train", "training")


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
    reads: frozenset[int] = frozenset()
    changes: frozenset[int] = frozenset()
    random: bool = False

    @property
    def returns(self) -> frozenset[int]:
        """The storages of its results."""
        return frozenset(value.storage for value in self.values)


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


Evaluate = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]


def evaluate(
    module: fx.GraphModule, inputs: Mapping[str, Tensor], call: Evaluate, held: Callable[[Any], Any]
) -> dict[fx.Node, Any]:
    """Go through the graph in its order; `call(node, args, kwargs)` returns the result of an operation.

    `held` returns the stand-in for a parameter, a buffer or a constant of the module.
    """
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs[node.target]
        elif node.op == "get_attr":
            values[node] = held(operator.attrgetter(node.target)(module))
        elif node.op == "call_function":
            args, kwargs = (fx.map_arg(given, values.__getitem__) for given in (node.args, node.kwargs))
            values[node] = call(node, args, kwargs)
    return values


def observe(
    module: fx.GraphModule, inputs: Mapping[str, Tensor], held: Callable[[Any], Any]
) -> dict[fx.Node, Observed]:
    """Return every node's behaviour; storages that two nodes share have one number."""
    numbers = StorageNumbers()
    observed: dict[fx.Node, Observed] = {}

    def call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in given]
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        changed = [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
        # Taking one of several results out reads nothing of its memory.
        reads = () if node.target is operator.getitem else map(numbers.of, given)
        observed[node] = Observed(
            values=_values(result, numbers),
            tensor=isinstance(result, Tensor),
            reads=frozenset(reads),
            changes=frozenset(map(numbers.of, changed)),
            random=any(True for _ in _draws_of(module, node)),
        )
        return result

    with torch.enable_grad():
        results = evaluate(module, inputs, call, held)
    for node, result in results.items():
        if node not in observed:
            observed[node] = Observed(_values(result, numbers), isinstance(result, Tensor))
    return observed


def _values(result: object, numbers: StorageNumbers) -> tuple[Value, ...]:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return tuple(
        Value(numbers.of(t), tuple(t.shape), t.dtype, t.numel() * t.element_size(), t.requires_grad) for t in tensors
    )


def number_draws(module: fx.GraphModule) -> None:
    """Write `ordinal` into the meta of every node that draws random numbers: how many nodes draw before it."""
    draws = (drawing for node in module.graph.nodes for drawing in _draws_of(module, node))
    for ordinal, node in enumerate(draws):
        node.meta["ordinal"] = ordinal


def _draws_of(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Yield the node if it draws random numbers, and the nodes that do in the graphs that it runs."""
    if node.op != "call_function":
        return
    if is_random(node.target, node.args, node.kwargs):
        yield node
    for source in node.all_input_nodes:
        inner = getattr(module, str(source.target), None) if source.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            for of_inner in inner.graph.nodes:
                yield from _draws_of(inner, of_inner)


def is_random(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call in a graph or run draws random numbers; dropout of nothing and plain attention do not."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    defaults = {argument.name: argument.default_value for argument in function._schema.arguments}
    given = defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)
    off = any(name in given and given[name] in (0, False) for name in _SWITCHES)
    certain = "dropout" in function._schema.name and given.get("p") in (0, 1)
    return not (off or certain)
