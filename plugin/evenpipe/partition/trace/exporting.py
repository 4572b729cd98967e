"""From a model to the graph of one forward that ends in its loss, by torch.export."""

from __future__ import annotations

import contextlib
import inspect
import io
import linecache
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

from evenpipe.partition.trace.drawing import number_draws
from evenpipe.partition.trace.effects import effect_of
from evenpipe.partition.trace.state import restored

__all__ = ["TraceError", "export", "weightless", "weightless_copy"]


class TraceError(ValueError):
    """A model cannot be traced; the message is one line that names the operation and the user's file and line."""


@contextlib.contextmanager
def weightless() -> Iterator[FakeTensorMode]:
    """Tensors that are made inside have shapes, types and devices but no memory, and so have models."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def export(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[fx.GraphModule, dict[str, Tensor], FakeTensorMode]:
    """The graph of `model(**inputs)`, up to the loss; its inputs by the names of its placeholders; where both live.

    Everything in it is weightless, and every placeholder a tensor. Raises TraceError.
    """
    names = inspect.signature(model.forward).parameters
    if unknown := [name for name in inputs if name not in names and not _takes_any(names)]:
        raise TraceError(f"{type(model).__name__}.forward has no argument {unknown[0]!r}: it has {', '.join(names)}")
    mode = detect_fake_mode([*model.parameters(), *model.buffers(), *tree_leaves(dict(inputs))])
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    made = mode if any(isinstance(p, FakeTensor) for p in model.parameters()) else contextlib.nullcontext()
    with _quiet(), restored(model), made:
        _refuse_effects(model, inputs, mode)
        try:
            # Without run_decompositions, which makes views that hold for one layout of memory only.
            exported = torch.export.export(model, (), dict(inputs), strict=False)
            module = exported.module(check_guards=False)
        except Exception as error:
            raise TraceError(f"{type(model).__name__} cannot be exported: {_culprit(error, model)}") from error
    assert isinstance(module, fx.GraphModule)
    _make_weightless(module, model, mode)
    given = tree_leaves(dict(inputs))
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    fakes = tree_map_only(Tensor, lambda tensor: weightless_copy(mode, tensor), given)
    bound = {node.target: value for node, value in zip(placeholders, fakes, strict=True) if isinstance(value, Tensor)}
    number_draws(module)  # what the loss does not need draws too when the model runs
    _up_to_the_loss(module, type(model).__name__, exported.call_spec.out_spec)
    _refuse_sizes_of_values(module, type(model).__name__)
    for node in placeholders:
        if node.target not in bound:
            module.graph.erase_node(node)  # a constant, which the graph has taken in
    return module, bound, mode


def _refuse_effects(model: nn.Module, inputs: Mapping[str, Any], mode: FakeTensorMode) -> None:
    """Raise TraceError where the model does what its graph would not. What cannot be run is left for export to say."""
    state: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers(remove_duplicate=False))
    fakes = {id(one): weightless_copy(mode, one) for one in state.values()}
    given = tree_map_only(Tensor, lambda tensor: weightless_copy(mode, tensor), dict(inputs))

    def run() -> None:
        with mode, torch.enable_grad():
            copies = {at: one if isinstance(one, nn.Parameter) else one.detach().clone() for at, one in fakes.items()}
            torch.func.functional_call(model, {name: copies[id(one)] for name, one in state.items()}, (), given)

    try:
        with restored(model):
            effect = effect_of(model, run, lambda tensor: weightless_copy(mode, tensor))
    except Exception:
        return
    if effect is not None:
        raise TraceError(f"{type(model).__name__} cannot be traced: {effect}")


def _takes_any(names: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch prints and logs whole graphs when an export fails; transformers warns of its own defaults."""
    loggers = [
        logging.getLogger(name) for name in ("torch.export", "torch.fx.experimental.symbolic_shapes", "transformers")
    ]
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
    """`FILE:LINE: \\`code\\`: reason`, of the innermost line outside torch that the error went through."""
    installed = str(Path(torch.__file__).parent)
    ours = str(Path(__file__).parent.parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((installed, ours, "<"))
    ]
    operation = getattr(error, "func", None)
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    what = f"{operation}: {reason}" if operation is not None and str(operation) not in reason else reason
    if not frames or frames[-1].lineno is None:
        return f"{inspect.getsourcefile(type(model)) or type(model).__module__}: {what}"
    frame = frames[-1]
    code = linecache.getline(frame.filename, frames[-1].lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno}: `{code}`: {what}"


def weightless_copy(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """The tensor itself, if it is weightless; for the same real tensor always the same copy."""
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor, static_shapes=True)


def _make_weightless(module: fx.GraphModule, model: nn.Module, mode: FakeTensorMode) -> None:
    """Parameters and buffers become fake ones, what was shared still is; constants of the code keep their values."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    fake_of: dict[int, Tensor] = {}
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None and f"{path}.{name}".lstrip(".") in names:
                    table[name] = fake_of.setdefault(id(tensor), weightless_copy(mode, tensor))


def _up_to_the_loss(module: fx.GraphModule, name: str, structure: TreeSpec) -> None:
    """Reduces the output to the loss, and leaves out what neither it needs nor a side effect.

    What else the model returns, and is computed on the way, has its name there in its meta, as `output`.
    """
    graph = module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    returned = [node for node in tree_leaves(output.args) if isinstance(node, fx.Node)]
    losses = [node for node in returned if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].numel() == 1]
    if not losses:
        raise TraceError(f"{name} returns no loss: its forward should return a tensor of one element, first if several")
    places = tree_flatten_with_path(tree_unflatten(list(range(structure.num_leaves)), structure))[0]
    for (path, _), node in zip(places, tree_leaves(output.args), strict=True):
        if isinstance(node, fx.Node) and node is not losses[0] and isinstance(node.meta.get("val"), Tensor):
            node.meta.setdefault("output", ".".join(str(_key(step)) for step in path))
    output.args = (losses[0],)
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target) and not node.users:
            graph.erase_node(node)
        elif node.op == "call_module" and not node.users:
            graph.erase_node(node)  # checks of inputs
        elif node.op == "get_attr":
            first = seen.setdefault(str(node.target), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=_has_effect)


def _key(step: Any) -> object:
    return next((getattr(step, kind) for kind in ("key", "idx", "name") if hasattr(step, kind)), step)


def _refuse_sizes_of_values(module: fx.GraphModule, name: str) -> None:
    """A pipeline's stages send tensors of sizes that are known before; raises TraceError where values give one.

    So it does where a number is read from a tensor: without memory there is none.
    """
    for node in module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            read = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
            if read or (isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape)):
                where = re.findall(r'File "(.+)", line (\d+).*\n *(.*)', node.meta.get("stack_trace") or "")
                place = "{}:{}: `{}`: ".format(*where[-1]) if where else ""
                what = "what it returns" if read else "the size of what it returns"
                raise TraceError(f"{name} cannot be traced: {place}{node.target}: {what} depends on values")


def _has_effect(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or (schema is not None and bool(schema.is_mutable))
