"""The graph of a model's operations that DawnPiper cuts (§3.2, B.1, C.1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from evenpipe.partition.trace.cutting import allowed_cuts, crossings
from evenpipe.partition.trace.exporting import TraceError, export, weightless_copy
from evenpipe.partition.trace.layering import ends_of_layers, module_path
from evenpipe.partition.trace.observing import Evaluate, Observed, evaluate, observe
from evenpipe.partition.trace.ordering import Unit, ordered, prefix_of
from evenpipe.runtime.precisions import autocast_dtype, autocasting

__all__ = ["Graph", "attention_of", "trace"]

_KEPT: Final = ("nn_module_stack", "stack_trace", "ordinal", "output")


@dataclass(frozen=True)
class Graph:
    """One micro-batch's forward up to the loss, node by node, on weightless tensors.

    `module` takes the `inputs` by name and returns the loss; its parameters have the model's names, and its nodes are
    in execution order: `prefix`, which every stage computes for itself, then `nodes`. Of each of the latter,
    `cut_allowed` says whether a stage may end with it, and `sent` whose results the next stage then receives.
    `own_order`: prefix and nodes as the model itself executes them. `unread`: parameters and buffers of the
    model's state that no node reads. `autocast`: the dtype of the `torch.autocast` that the model was traced under.
    `attention`: the kind that a model of Hugging Face's has.
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
    autocast: torch.dtype | None = None
    attention: str | None = None

    @property
    def micro_batch_size(self) -> int:
        """The samples of the inputs: the length of their first dimension."""
        return next(int(tensor.shape[0]) for tensor in self.inputs.values() if tensor.dim())

    @property
    def names(self) -> tuple[str, ...]:
        """Unique: the path of the module whose forward makes a node, and the node's own name."""
        return tuple(f"{path}:{node.name}" if (path := module_path(node)) else node.name for node in self.nodes)

    def evaluate(self, call: Evaluate) -> dict[fx.Node, Any]:
        """Goes through prefix and nodes on weightless tensors; `call(node, args, kwargs)` gives what each returns."""
        with self.mode, torch.enable_grad(), autocasting(_device_type(self.inputs.values()), self.autocast):
            return evaluate(self.module, self.inputs, call, self.held)

    def held(self, value: Any) -> Any:
        """The weightless stand-in for what the module holds: a constant's, or a parameter as it is."""
        return _weightless(self.mode, value)

    def cut_bytes(self, number: int) -> int:
        """What the next stage receives if one ends with node `number`."""
        return sum(value.nbytes for node in self.sent[number] for value in self.observed[node].values)


def trace(model: nn.Module, inputs: Mapping[str, Any]) -> Graph:
    """The graph of `model(**inputs)`, which returns the loss, or the loss first.

    The model may be weightless, and is not changed. The graph holds for these inputs' shapes, and for training if the
    model is in training mode, under the `torch.autocast` that is on, if any. Raises TraceError.
    """
    module, bound, mode = export(model, inputs)
    with mode:
        seen = observe(module, bound, lambda value: _weightless(mode, value))
    prefix = prefix_of(module.graph.nodes, seen, module)
    original = list(module.graph.nodes)
    main = [node for node in original if node.op == "call_function" and node not in prefix]
    if not main:
        raise TraceError(f"{type(model).__name__} has no operation that a gradient passes")
    module, copies = _reordered(module, prefix, found := ordered(main, seen))
    units: list[Unit] = [tuple(copies[node] for node in unit) for unit in found]
    seen = {copies[node]: it for node, it in seen.items() if node in copies}
    nodes = tuple(node for unit in units for node in unit)
    sent = crossings(nodes)
    resident = {value.storage for node in seen.keys() - set(nodes) for value in seen[node].values}
    allowed = allowed_cuts(units, sent, seen, resident)
    return Graph(
        module=module,
        inputs=bound,
        mode=mode,
        prefix=tuple(copies[node] for node in original if node in prefix and node.op == "call_function"),
        nodes=nodes,
        observed=seen,
        cut_allowed=tuple(allowed),
        sent=tuple(sent),
        layer_ends=ends_of_layers(model, nodes, allowed),
        own_order=tuple(copies[node] for node in original if node in copies and node.op == "call_function"),
        unread={name: weightless_copy(mode, tensor) for name, tensor in _unread(model, module).items()},
        autocast=autocast_dtype(_device_type(bound.values())),
        attention=attention_of(model),
    )


def _reordered(
    module: fx.GraphModule, prefix: Collection[fx.Node], units: Sequence[Unit]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """The module with its nodes in the order of the units, after inputs, parameters and prefix; the copy of each."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    original = list(module.graph.nodes)
    first = [node for node in original if node.op in ("placeholder", "get_attr") or node in prefix]
    for node in [*first, *(node for unit in units for node in unit)]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    loss = next(node for node in original if node.op == "output").args[0]
    assert isinstance(loss, fx.Node)
    graph.output(copies[loss])
    return fx.GraphModule(module, graph, "Forward"), copies


def attention_of(model: nn.Module) -> str | None:
    """Return the kind of attention that a model of Hugging Face's has, such as sdpa; None of other models."""
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return kind if isinstance(kind, str) else None


def _device_type(tensors: Iterable[Tensor]) -> str:
    return next((one.device.type for one in tensors), "cpu")


def _unread(model: nn.Module, module: fx.GraphModule) -> dict[str, Tensor]:
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    state = {name: of for name, of in model.state_dict(keep_vars=True).items() if isinstance(of, Tensor)}
    known = {id(tensor) for name, tensor in state.items() if name in read}
    return {name: tensor for name, tensor in state.items() if id(tensor) not in known}


def _weightless(mode: FakeTensorMode, value: Any) -> Any:
    return weightless_copy(mode, value) if isinstance(value, Tensor) else value
