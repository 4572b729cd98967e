"""What each node of a graph keeps for the backward, and what its forward and backward have to do (DawnPiper C.1)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from evenpipe.partition.profile import Parameter, Storage
from evenpipe.partition.trace import Graph, StorageNumbers
from evenpipe.runtime.precisions import precision_name
from evenpipe.runtime.saved import plain_parts

__all__ = ["Counts", "Effort", "NodeCounts", "Progress", "Work", "count", "on_saved", "without_history"]

_aten = torch.ops.aten

#: Is called with how many are done, of how many.
Progress = Callable[[int, int], None]
_Call = Callable[..., Any]

# Adam keeps two moments of each element in fp32, and of a half-precision parameter an fp32 copy, which it updates.
_MOMENT_BYTES: Final = 2 * 4
_MASTER_BYTES: Final = 4
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
    """The work of one node for one micro-batch."""

    forward: Effort = Effort()
    backward: Effort = Effort()


class NodeCounts(NamedTuple):
    """One node: what `evenpipe.partition.profile.Node` says of it, without times, and its work."""

    name: str
    random: bool
    cut_allowed: bool
    cut_bytes: int
    output_bytes: int
    left_bytes: int
    work: Work


@dataclass(frozen=True)
class Counts:
    """A graph's nodes; storages in the order of their allocation, parameters in that of their first use.

    Buffers count as parameters without gradient or optimizer state. `digest`, `autocast`, `attention`: the graph's.
    """

    nodes: tuple[NodeCounts, ...]
    storages: tuple[Storage, ...]
    parameters: tuple[Parameter, ...]
    layer_ends: tuple[int, ...]
    micro_batch_size: int
    precision: str
    digest: str
    autocast: str | None
    attention: str | None


@dataclass
class _StorageUses:
    nbytes: int
    producer: int
    users: set[int] = field(default_factory=set)
    savers: set[int] = field(default_factory=set)
    changers: set[int] = field(default_factory=set)


def count(graph: Graph, device_type: str, progress: Progress = lambda done, total: None) -> Counts:
    """Run the graph once, weightless, and note what autograd saves (C.1), each storage once, and what each node does.

    `device_type`: "cpu" or "cuda", whose kernels to count. The gradient of a parameter has its type, the optimizer is
    Adam. Nodes that do the same on the same shapes, as those of repeated layers, have their work counted once.
    `progress(done, total)` is called after each node.
    """
    replaced = _CUDA_KERNELS if device_type == "cuda" else {}
    numbers = StorageNumbers()
    gets = graph.module.graph.find_nodes(op="get_attr")
    held = [(node, graph.held(operator.attrgetter(str(node.target))(graph.module))) for node in gets]
    resident = {numbers.of(tensor) for _, tensor in held if isinstance(tensor, Tensor)}
    index = {node: number for number, node in enumerate(graph.nodes)}
    storages: dict[int, _StorageUses] = {}
    works: dict[Any, Work] = {}
    nodes: list[NodeCounts] = []

    def uses_of(tensor: Tensor, producer: int) -> _StorageUses | None:
        number = numbers.of(tensor)
        if number in resident:
            return None
        return storages.setdefault(number, _StorageUses(tensor.untyped_storage().nbytes(), producer))

    def trained(weight: Tensor) -> bool:
        return weight.requires_grad and weight.dim() == 2 and numbers.of(weight) in resident

    def call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel: _Call = replaced.get(node.target, node.target)  # type: ignore[arg-type]
        place = index.get(node, -1)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            uses_of(tensor, -1)  # an input of the model, when it is first read

        def note_saved(tensor: Tensor) -> None:
            if (uses := uses_of(tensor, place)) is not None:
                uses.savers.add(place)

        if place >= 0:
            key = (kernel, _signature((args, kwargs)))
            if key not in works:
                works[key] = _work(kernel, args, kwargs, changes=bool(graph.observed[node].changes))
        versions = [tensor._version for tensor in given]
        with on_saved(note_saved):
            result = kernel(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            uses_of(tensor, place)
        if place < 0:
            return result
        for tensor, version in zip(given, versions, strict=True):
            if (uses := uses_of(tensor, -1)) is not None and uses.producer != place:
                uses.users.add(place)
                if tensor._version != version:
                    uses.changers.add(place)
        output_bytes = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
        nodes.append(
            NodeCounts(
                name=names[place],
                random=graph.observed[node].random,
                cut_allowed=graph.cut_allowed[place],
                cut_bytes=graph.cut_bytes(place),
                output_bytes=output_bytes,
                left_bytes=output_bytes if node.target is _aten.linear.default and trained(args[1]) else 0,
                work=works[key],
            )
        )
        progress(len(nodes), len(graph.nodes))
        return result

    names = graph.names
    graph.evaluate(call)
    return Counts(
        nodes=tuple(nodes),
        storages=tuple(
            Storage(
                nbytes=uses.nbytes,
                producer=uses.producer,
                users=tuple(sorted(uses.users)),
                savers=tuple(sorted(uses.savers)),
                changers=tuple(sorted(uses.changers)),
            )
            for uses in sorted(storages.values(), key=lambda uses: uses.producer)
            if uses.producer >= 0 or uses.users or uses.savers
        ),
        parameters=_parameters(held, index, numbers),
        layer_ends=graph.layer_ends,
        micro_batch_size=graph.micro_batch_size,
        precision=_precision(graph),
        digest=graph.digest,
        autocast=precision_name(graph.autocast),
        attention=graph.attention,
    )


def _parameters(
    held: list[tuple[fx.Node, Any]], index: dict[fx.Node, int], numbers: StorageNumbers
) -> tuple[Parameter, ...]:
    """Return each parameter once, though it have several names (tied weights)."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    users: dict[int, set[int]] = {}
    for node, tensor in held:
        if isinstance(tensor, Tensor):
            number = numbers.of(tensor)
            tensors.setdefault(number, (str(node.target), tensor))
            users.setdefault(number, set()).update(index[user] for user in node.users if user in index)
    parameters = []
    for number in sorted((number for number in tensors if users[number]), key=lambda number: min(users[number])):
        name, tensor = tensors[number]
        trained, nbytes = tensor.requires_grad, tensor.untyped_storage().nbytes()
        state = _MOMENT_BYTES + (_MASTER_BYTES if tensor.element_size() < 4 else 0)
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


def _precision(graph: Graph) -> str:
    """Return the type in which most of the parameters are."""
    elements: dict[torch.dtype, int] = {}
    for parameter in graph.module.parameters():
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    most = max(elements, key=lambda dtype: elements[dtype], default=torch.float32)
    return "fp64" if most == torch.float64 else str(precision_name(most))


def on_saved(note: Callable[[Tensor], None]) -> AbstractContextManager[object]:
    """Call `note` with each tensor that autograd saves in the context, views and repetitions too; change nothing.

    A tensor that is taken apart is noted as the tensors that it consists of.
    """

    def pack(tensor: Tensor) -> Tensor:
        for part in plain_parts(tensor):
            note(part)
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def without_history(value: Any, leaves: list[Tensor], *, changes: bool) -> Any:
    """Return an argument of a node that runs alone; a tensor that takes a gradient joins `leaves`.

    A leaf must not be changed in place, so where the node `changes` it, it gets a copy.
    """
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().requires_grad_(value.requires_grad)
    if leaf.requires_grad:
        leaves.append(leaf)
    return leaf.clone() if changes else leaf


def _signature(arguments: object) -> tuple[Any, ...]:
    leaves, structure = tree_flatten(arguments)
    described = (
        (tuple(x.shape), x.stride(), x.dtype, x.requires_grad, x.untyped_storage().nbytes())
        if isinstance(x, Tensor)
        else repr(x)
        for x in leaves
    )
    return (str(structure), *described)


def _work(kernel: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, changes: bool) -> Work:
    leaves: list[Tensor] = []
    args, kwargs = tree_map(lambda value: without_history(value, leaves, changes=changes), (args, kwargs))
    result, forward = _effort(lambda: kernel(*args, **kwargs))
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs or not leaves:
        return Work(forward)
    gradients = [torch.empty_like(output) for output in outputs]
    _, backward = _effort(lambda: torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))
    return Work(forward, backward)


def _effort(run: Callable[[], Any]) -> tuple[Any, Effort]:
    with FlopCounterMode(display=False) as flops, _Moved() as moved:
        result = run()
    return result, Effort(flops.get_total_flops(), moved.moved, moved.kernels)


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
    """Return the bytes in memory: of an expanded tensor its storage's, of a slice those that it covers."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _cuda_dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """A CPU's dropout saves its mask in the type of what it drops, and CUDA's one byte an element."""
    if not train or not 0 < p < 1:
        return _aten.dropout.default(tensor, p, train)  # type: ignore[no-any-return]
    return _aten.native_dropout.default(tensor, p, train)[0]  # type: ignore[no-any-return]


def _cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the memory-efficient kernel, which any mask and precision goes through (flash attention saves the same).

    With dropout, a CPU's attention takes the path that keeps all scores, and CUDA's does not.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    output = _aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, query.requires_grad or key.requires_grad, dropout_p, is_causal, scale=scale
    )
    return output[0]  # type: ignore[no-any-return]


#: The operations that a GPU runs where they differ in what they save from those of the CPU that counts them.
_CUDA_KERNELS: Final[dict[Any, _Call]] = {
    _aten.dropout.default: _cuda_dropout,
    _aten.scaled_dot_product_attention.default: _cuda_attention,
}
