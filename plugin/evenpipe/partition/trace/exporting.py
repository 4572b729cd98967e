"""From a model to the graph of one forward that ends in its loss, by torch.export."""

from __future__ import annotations

import contextlib
import inspect
import io
import linecache
import logging
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

from evenpipe.partition.trace.effects import effect_of
from evenpipe.partition.trace.observing import number_draws
from evenpipe.partition.trace.state import restored

__all__ = ["TraceError", "export", "tensors_of", "users_frame", "weightless", "weightless_copy"]

_TORCH: Final = str(Path(torch.__file__).parent)
_PARTITION: Final = str(Path(__file__).parent.parent)
_FRAME: Final = re.compile(r'File "(.+)", line (\d+).*\n *(.*)')
#: What these print and log when an export fails are whole graphs; transformers warns of its own defaults.
_LOGGERS: Final = (
    *("torch.export", "torch.fx.experimental.symbolic_shapes", "transformers"),
    "torch._subclasses.fake_tensor",  # of an operator without the data type, for which the model has another
)
#: Operations that read only the type or shape of their second tensor, those that are given it, and what they are given.
_BY_EXAMPLE: Final[Mapping[Any, tuple[Any, Callable[[Tensor], Any]]]] = {
    torch.ops.aten.type_as.default: (torch.ops.aten.to.dtype, lambda example: example.dtype),
    torch.ops.aten.expand_as.default: (torch.ops.aten.expand.default, lambda example: list(example.shape)),
    torch.ops.aten.view_as.default: (torch.ops.aten.view.default, lambda example: list(example.shape)),
    torch.ops.aten.reshape_as.default: (torch.ops.aten.reshape.default, lambda example: list(example.shape)),
}


class TraceError(ValueError):
    """A model cannot be traced; the message is one line that names the operation and the user's file and line."""


@contextlib.contextmanager
def weightless() -> Iterator[FakeTensorMode]:
    """Tensors that are made inside have shapes, types and devices but no memory, and so have models."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def weightless_copy(mode: FakeTensorMode, value: Any) -> Any:
    """Return a real tensor's copy, always the same for the same; anything else is returned as it is."""
    real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
    return mode.from_tensor(value, static_shapes=True) if real else value


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all of their names, tied ones under each."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def export(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[fx.GraphModule, dict[str, Tensor], FakeTensorMode]:
    """Return the graph of `model(**inputs)` up to the loss, its inputs by their placeholders, and where both live.

    Everything in it is weightless, and every placeholder a tensor. Raises TraceError.
    """
    kind, arguments = type(model).__name__, inspect.signature(model.forward).parameters
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    if unknown := [name for name in inputs if name not in arguments and not takes_any]:
        raise TraceError(f"{kind}.forward has no argument {unknown[0]!r}: it has {', '.join(arguments)}")
    mode = detect_fake_mode([*model.parameters(), *model.buffers(), *tree_leaves(dict(inputs))])
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    under = mode if any(isinstance(p, FakeTensor) for p in model.parameters()) else contextlib.nullcontext()
    with _quiet(), restored(model), under:
        _refuse_effects(model, inputs, mode)
        try:
            # Without run_decompositions, which makes views that hold for one layout of memory only.
            exported = torch.export.export(model, (), dict(inputs), strict=False)
            module = exported.module(check_guards=False)
        except Exception as error:
            raise TraceError(f"{kind} cannot be exported: {_culprit(error, model)}") from error
    assert isinstance(module, fx.GraphModule)
    _make_weightless(module, model, mode)
    placeholders = module.graph.find_nodes(op="placeholder")
    copies = [weightless_copy(mode, leaf) for leaf in tree_leaves(dict(inputs))]
    bound = {node.target: copy for node, copy in zip(placeholders, copies, strict=True) if isinstance(copy, Tensor)}
    number_draws(module)  # what the loss does not need draws too when the model runs
    _without_examples(module)
    _up_to_the_loss(module, kind, exported.call_spec.out_spec)
    _refuse_sizes_of_values(module, kind)
    for node in placeholders:
        if node.target not in bound:
            module.graph.erase_node(node)  # a constant, which the graph has taken in
    return module, bound, mode


def _refuse_effects(model: nn.Module, inputs: Mapping[str, Any], mode: FakeTensorMode) -> None:
    """Raise TraceError where the model does what its graph would not. A model that cannot run is left to export."""
    copy = partial(weightless_copy, mode)
    state = tensors_of(model)
    copies = {id(tensor): copy(tensor) for tensor in state.values()}
    given = tree_map_only(Tensor, copy, dict(inputs))

    def run() -> None:
        with mode, torch.enable_grad():
            own = {at: t if isinstance(t, nn.Parameter) else t.detach().clone() for at, t in copies.items()}
            torch.func.functional_call(model, {name: own[id(tensor)] for name, tensor in state.items()}, (), given)

    try:
        with restored(model):
            effect = effect_of(model, run, copy)
    except Exception:
        return
    if effect is not None:
        raise TraceError(f"{type(model).__name__} cannot be traced: {effect}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _culprit(error: BaseException, model: nn.Module) -> str:
    """Return `FILE:LINE: \\`code\\`: reason`, of the innermost line outside torch that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((_TORCH, _PARTITION, "<"))]
    operation = getattr(error, "func", None)
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    what = f"{operation}: {reason}" if operation is not None and str(operation) not in reason else reason
    if not users or users[-1].lineno is None:
        return f"{inspect.getsourcefile(type(model)) or type(model).__module__}: {what}"
    file, line = users[-1].filename, users[-1].lineno
    return f"{file}:{line}: `{linecache.getline(file, line).strip()}`: {what}"


def users_frame(node: fx.Node) -> tuple[str, str, str] | None:
    """Return file, line and source of the innermost call outside torch that the node comes from."""
    frames: list[tuple[str, str, str]] = _FRAME.findall(node.meta.get("stack_trace") or "")
    return next((frame for frame in reversed(frames) if not frame[0].startswith(_TORCH)), None)


def _make_weightless(module: fx.GraphModule, model: nn.Module, mode: FakeTensorMode) -> None:
    """Make parameters and buffers weightless, shared ones still shared; constants of the code keep their values."""
    names = tensors_of(model)
    copies: dict[int, Tensor] = {}
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None and f"{path}.{name}".lstrip(".") in names:
                    table[name] = copies.setdefault(id(tensor), weightless_copy(mode, tensor))


def _up_to_the_loss(module: fx.GraphModule, name: str, structure: TreeSpec) -> None:
    """Reduce the output to the loss, and leave out what neither it needs nor a side effect.

    Other outputs of the model that are computed on the way have their names in their meta, as `output`.
    """
    graph = module.graph
    output = graph.output_node()
    returned = tree_leaves(output.args)
    tensors = [node for node in returned if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)]
    loss = next((node for node in tensors if node.meta["val"].numel() == 1), None)
    if loss is None:
        raise TraceError(f"{name} returns no loss: its forward should return a tensor of one element, first if several")
    paths = tree_flatten_with_path(tree_unflatten(list(range(structure.num_leaves)), structure))[0]
    for (path, _), node in zip(paths, returned, strict=True):
        if node in tensors and node is not loss:
            node.meta.setdefault("output", ".".join(str(_key(step)) for step in path))
    output.args = (loss,)
    held: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        check = node.op == "call_module" or (node.op == "call_function" and "_assert" in str(node.target))
        if check and not node.users:
            graph.erase_node(node)
        elif node.op == "get_attr" and (first := held.setdefault(str(node.target), node)) is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=_has_effect)


def _without_examples(module: fx.GraphModule) -> None:
    """Name the type or shape that an operation reads of another tensor: else a stage would be sent that tensor."""
    for target, (plain, asked) in _BY_EXAMPLE.items():
        for node in module.graph.find_nodes(op="call_function", target=target):
            value, example = (one.meta["val"] for one in node.args)
            if value.device == example.device:
                node.target, node.args = plain, (node.args[0], asked(example))


def _key(step: Any) -> object:
    return next((getattr(step, kind) for kind in ("key", "idx", "name") if hasattr(step, kind)), step)


def _refuse_sizes_of_values(module: fx.GraphModule, name: str) -> None:
    """Raise TraceError where values give a tensor's size, as stages send tensors of sizes that are known before.

    So it does where a number is read from a tensor: without memory there is none.
    """
    for node in module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            read = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
            if read or (isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape)):
                frame = users_frame(node)
                place = "{}:{}: `{}`: ".format(*frame) if frame else ""
                what = "what it returns" if read else "the size of what it returns"
                raise TraceError(f"{name} cannot be traced: {place}{node.target}: {what} depends on values")


def _has_effect(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or (schema is not None and bool(schema.is_mutable))
