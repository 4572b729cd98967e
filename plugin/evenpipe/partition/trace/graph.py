"""The graph of a model's operations that DawnPiper cuts (§3.2, B.1, C.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from evenpipe.partition.trace.exporting import TraceError, export, weightless_copy
from evenpipe.partition.trace.observing import Evaluate, Observed, evaluate, observe
from evenpipe.partition.trace.ordering import allowed_cuts, crossings, ordered, prefix_of
from evenpipe.runtime.precisions import autocast_dtype, autocasting

__all__ = ["Graph", "PartNodes", "attention_of", "trace"]

_META: Final = ("nn_module_stack", "stack_trace", "ordinal", "output")


class PartNodes(NamedTuple):
    """The nodes of one part. `first`, `last`: in the graph; `body`: these, and what they need of the prefix.

    The body is in the model's own order, not by depth: then gradients of what is used several times add up in the
    model's own order, and the code reads as the user's does.
    """

    first: int
    last: int
    body: tuple[fx.Node, ...]
    received: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Graph:
    """One micro-batch's forward up to the loss, node by node, on weightless tensors.

    `module` takes the `inputs` by name and returns the loss; its parameters have the model's names, and its nodes are
    in execution order: `prefix`, which every stage computes for itself, then `nodes`. Of each of the latter,
    `cut_allowed` says whether a stage may end with it, and `sent` whose results the next stage then receives.
    `layer_ends`: the last node of each layer. `own_order`: prefix and nodes as the model itself executes them.
    `unread`: parameters and buffers of the model's state that no node reads. `autocast`: the dtype of the
    `torch.autocast` that the model was traced under. `attention`: the kind that a model of Hugging Face's has.
    """

    module: fx.GraphModule
    inputs: Mapping[str, Tensor]
    mode: FakeTensorMode
    prefix: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    observed: Mapping[fx.Node, Observed]
    cut_allowed: tuple[bool, ...]
    sent: tuple[tuple[fx.Node, ...], ...]
    layer_ends: tuple[int, ...]
    own_order: tuple[fx.Node, ...]
    unread: Mapping[str, Tensor]
    autocast: torch.dtype | None
    attention: str | None

    @property
    def micro_batch_size(self) -> int:
        """The samples of the inputs: the length of their first dimension."""
        return next(int(tensor.shape[0]) for tensor in self.inputs.values() if tensor.dim())

    @property
    def names(self) -> tuple[str, ...]:
        """Unique: the path of the module whose forward makes a node, and the node's own name."""
        return tuple(f"{path}:{node.name}" if (path := _module_path(node)) else node.name for node in self.nodes)

    @property
    def digest(self) -> str:
        """Return a digest of operations, shapes and parameters, whatever the micro-batch size.

        It does not depend on whole numbers, nor on the prefix.
        """
        digest = hashlib.sha256()
        for line in self._digested():
            digest.update(f"{line}\n".encode())
        return digest.hexdigest()

    def _digested(self) -> Iterator[object]:
        for name, tensor in sorted(self.inputs.items()):
            yield name, tuple(tensor.shape[1:]), tensor.dtype
        for name, tensor in sorted([*self.module.named_parameters(), *self.module.named_buffers()], key=itemgetter(0)):
            yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        if self.autocast is not None:
            yield "autocast", self.autocast
        index = {node: number for number, node in enumerate(self.nodes)}
        for node in self.nodes:
            # Whole numbers may be sizes.
            values = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, float | bool | str)]
            held = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
            yield str(node.target), [index[source] for source in node.all_input_nodes if source in index], held, values

    def evaluate(self, call: Evaluate) -> dict[fx.Node, Any]:
        """Go through prefix and nodes on weightless tensors; `call(node, args, kwargs)` returns a node's result."""
        with self.mode, torch.enable_grad(), autocasting(_device_type(self.inputs.values()), self.autocast):
            return evaluate(self.module, self.inputs, call, self.held)

    def held(self, value: Any) -> Any:
        """Return the weightless stand-in for what the module holds: a constant's, or a parameter as it is."""
        return weightless_copy(self.mode, value)

    def parts(self, cuts: Sequence[int]) -> list[PartNodes]:
        """Return the parts of the graph that is cut behind these nodes."""
        bounds = [-1, *cuts, len(self.nodes) - 1]
        return [self._part(before + 1, last) for before, last in pairwise(bounds)]

    def _part(self, first: int, last: int) -> PartNodes:
        own = set(self.nodes[first : last + 1])
        wanted = own | self._needed(own)
        return PartNodes(
            first=first,
            last=last,
            body=tuple(node for node in self.own_order if node in wanted),
            received=self.sent[first - 1] if first else (),
            sent=self.sent[last] if last < len(self.nodes) - 1 else (),
        )

    def _needed(self, own: set[fx.Node]) -> set[fx.Node]:
        """Return the nodes of the prefix that these nodes read, and those that change it in place."""
        needed: set[fx.Node] = set()
        prefix = set(self.prefix)
        new = {source for node in own for source in node.all_input_nodes if source in prefix}
        while new:
            needed |= new
            storages = frozenset[int]().union(*(self.observed[node].returns for node in needed))
            new = {source for node in needed for source in node.all_input_nodes if source in prefix}
            new |= {node for node in prefix if self.observed[node].changes & storages}
            new -= needed
        return needed

    def cut_bytes(self, number: int) -> int:
        """Return the bytes that the next stage receives if one ends with node `number`."""
        return sum(value.nbytes for node in self.sent[number] for value in self.observed[node].values)


def trace(model: nn.Module, inputs: Mapping[str, Any]) -> Graph:
    """Return the graph of `model(**inputs)`, which returns the loss, or the loss first.

    The model may be weightless, and is not changed. The graph holds for these inputs' shapes, and for training if the
    model is in training mode, under the `torch.autocast` that is on, if any. Raises TraceError.
    """
    module, bound, mode = export(model, inputs)
    with mode:
        observed = observe(module, bound, lambda value: weightless_copy(mode, value))
    own = list(module.graph.nodes)
    prefix = prefix_of(own, observed, module)
    main = [node for node in own if node.op == "call_function" and node not in prefix]
    if not main:
        raise TraceError(f"{type(model).__name__} has no operation that a gradient passes")
    units = ordered(main, observed)
    first = [node for node in own if node.op in ("placeholder", "get_attr") or node in prefix]
    module, copies = _reordered(module, [*first, *(node for unit in units for node in unit)])
    units = [tuple(copies[node] for node in unit) for unit in units]
    observed = {copies[node]: behaviour for node, behaviour in observed.items() if node in copies}
    nodes = tuple(node for unit in units for node in unit)
    sent = crossings(nodes)
    resident = frozenset[int]().union(*(observed[node].returns for node in observed.keys() - set(nodes)))
    allowed = allowed_cuts(units, sent, observed, resident)
    called = [node for node in own if node in copies and node.op == "call_function"]
    return Graph(
        module=module,
        inputs=bound,
        mode=mode,
        prefix=tuple(copies[node] for node in called if node in prefix),
        nodes=nodes,
        observed=observed,
        cut_allowed=tuple(allowed),
        sent=tuple(sent),
        layer_ends=_ends_of_layers(model, nodes, allowed),
        own_order=tuple(copies[node] for node in called),
        unread={name: weightless_copy(mode, tensor) for name, tensor in _unread(model, module).items()},
        autocast=autocast_dtype(_device_type(bound.values())),
        attention=attention_of(model),
    )


def _reordered(module: fx.GraphModule, order: Iterable[fx.Node]) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return the module with its nodes in this order, and the copy of each node."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in order:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {key: node.meta[key] for key in _META if key in node.meta}
    loss = module.graph.output_node().args[0]
    assert isinstance(loss, fx.Node)
    graph.output(copies[loss])
    return fx.GraphModule(module, graph, "Forward"), copies


def attention_of(model: nn.Module) -> str | None:
    """Return the kind of attention that a model of Hugging Face's has, such as sdpa; None of other models."""
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return kind if isinstance(kind, str) else None


def _device_type(tensors: Iterable[Tensor]) -> str:
    return next((tensor.device.type for tensor in tensors), "cpu")


def _unread(model: nn.Module, module: fx.GraphModule) -> dict[str, Tensor]:
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    known = {id(tensor) for name, tensor in state.items() if name in read}
    return {name: tensor for name, tensor in state.items() if id(tensor) not in known}


def _module_path(node: fx.Node) -> str:
    """Return the module whose forward makes the node, as `bert.encoder.layer.3`; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _ends_of_layers(model: nn.Module, order: Sequence[fx.Node], allowed: Sequence[bool]) -> tuple[int, ...]:
    """Return the last node of what precedes the repeated blocks, of each block, and of what follows them.

    A block is a member of the outermost list or sequence with two members of one class. A layer ends at the next node
    where a cut is allowed.
    """
    lists = {name for name, module in model.named_modules() if _repeats(module)}
    blocks = [_block(node, lists) for node in order]
    last = {block: number for number, block in enumerate(blocks) if block}
    ends = {len(order) - 1}
    if last:
        start = next(number for number, block in enumerate(blocks) if block)
        cuts = [number for number, cut in enumerate(allowed) if cut]
        for wanted in {start - 1, *last.values()} - {-1}:
            ends.add(next((cut for cut in cuts if cut >= wanted), len(order) - 1))
    return tuple(sorted(ends))


def _repeats(module: nn.Module) -> bool:
    classes = [type(child) for child in module.children()]
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(set(classes)) < len(classes)


def _block(node: fx.Node, lists: set[str]) -> str:
    paths = (str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values())
    return next((path for path in paths if path and path.rpartition(".")[0] in lists), "")
