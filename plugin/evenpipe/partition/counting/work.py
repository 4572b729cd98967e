"""What the forward and the backward of each node have to do: floating-point operations, bytes moved, kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from evenpipe.partition.counting.kernels import Call, kernels_of
from evenpipe.partition.trace import Graph

__all__ = ["Effort", "Work", "count_work", "without_history"]

_aten = torch.ops.aten

# Allocations, and what changes only how memory is seen though its schema does not say so.
_FREE: Final = frozenset(
    {
        _aten.detach.default,
        _aten._unsafe_view.default,
        _aten._reshape_alias.default,
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.empty_strided.default,
    }
)
# Of their first argument they read as much as they write.
_PICKING: Final = frozenset(
    {_aten.embedding.default, _aten.index_select.default, _aten.gather.default, _aten.index.Tensor}
)


class Effort(NamedTuple):
    """`flops` of matrix products, convolutions and attention; `moved` bytes, to and from memory; `kernels` launched."""

    flops: int = 0
    moved: int = 0
    kernels: int = 0


class Work(NamedTuple):
    """What one node does for one micro-batch."""

    forward: Effort = Effort()
    backward: Effort = Effort()


class _Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels, and the bytes of their arguments and results; views are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = 0
        self.kernels = 0

    def __torch_dispatch__(
        self, function: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        if function.namespace != "prim" and not views and function not in _FREE:
            written = _nbytes(result)
            read = written + _nbytes(args[1:]) if function in _PICKING else _nbytes((args, kwargs))
            self.moved += read + written
            self.kernels += 1
        return result


def _nbytes(tree: object) -> int:
    """Of an expanded tensor what is in memory, of a slice what it covers."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def count_work(
    graph: Graph, device_type: str, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Work, ...]:
    """The work of each node, by running it weightless with the kernels of `device_type`, backward too.

    Nodes that do the same on the same shapes, as those of repeated layers, are run once. `progress(done, total)` is
    called after each node.
    """
    kernels = kernels_of(device_type)
    index = {node: number for number, node in enumerate(graph.nodes)}
    known: dict[Any, Work] = {}
    works: list[Work] = []

    def call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = kernels(node)
        if node in index:
            key = (function, _signature((args, kwargs)))
            if key not in known:
                known[key] = _work(function, args, kwargs, changes=bool(graph.observed[node].changes))
            works.append(known[key])
            progress(len(works), len(graph.nodes))
        return function(*args, **kwargs)

    graph.evaluate(call)
    return tuple(works)


def _signature(arguments: object) -> tuple[Any, ...]:
    leaves, structure = tree_flatten(arguments)
    described = (
        (tuple(x.shape), x.stride(), x.dtype, x.requires_grad, x.untyped_storage().nbytes())
        if isinstance(x, Tensor)
        else repr(x)
        for x in leaves
    )
    return (str(structure), *described)


def without_history(value: Any, leaves: list[Tensor], *, changes: bool) -> Any:
    """An argument of a node that runs alone; what takes a gradient joins `leaves`.

    A leaf must not be changed in place, so where the node `changes` it, it gets a copy.
    """
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().requires_grad_(value.requires_grad)
    if leaf.requires_grad:
        leaves.append(leaf)
    return leaf.clone() if changes else leaf


def _work(function: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, changes: bool) -> Work:
    leaves: list[Tensor] = []
    args, kwargs = tree_map(lambda value: without_history(value, leaves, changes=changes), (args, kwargs))
    result, forward = _counted(lambda: function(*args, **kwargs))
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs or not leaves:
        return Work(forward)
    gradients = [torch.empty_like(output) for output in outputs]
    _, backward = _counted(lambda: torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))
    return Work(forward, backward)


def _counted(run: Callable[[], Any]) -> tuple[Any, Effort]:
    with FlopCounterMode(display=False) as flops, _Moved() as moved:
        result = run()
    return result, Effort(flops.get_total_flops(), moved.moved, moved.kernels)
