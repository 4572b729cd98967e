"""The statements of a part's forward, and values and calls as Python text."""

from __future__ import annotations

import json
import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn

from evenpipe.partition.trace import Graph, PartNodes, users_frame
from evenpipe.stage_code.keeping import Kept
from evenpipe.stage_code.part import StageCodeError

__all__ = ["WIDTH", "Body", "bracketed", "value_text", "write_body"]

WIDTH: Final = 120
_INDENT: Final = 4
_STATEMENT_WIDTH: Final = WIDTH - 2 * _INDENT  # of a method
_RESERVED: Final = (
    *("self", "inputs", "draws", "received", "keep", "device", "device_of", "aten", "torch"),
    *keyword.kwlist,
)
_DEVICE: Final = re.compile(r"^ *[^# ].*\bdevice\b")
_grad_enabled: Final = torch.ops.higher_order.wrap_with_set_grad_enabled
_autocast: Final = torch.ops.higher_order.wrap_with_autocast

#: Names what a node returns.
Name = Callable[[fx.Node], str]


@dataclass
class Body:
    """Lines, without the indentation of a method; what they read; and the files that their comments name."""

    lines: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    random: list[int] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def write_body(graph: Graph, part: PartNodes, kept: Kept, files: Mapping[str, str]) -> Body:
    """`kept`: what is called through `keep`. `files`: names that other parts' comments gave to files of the user's."""
    return _Writer(graph, part, kept, Body(files=dict(files))).write()


class _Writer:
    def __init__(self, graph: Graph, part: PartNodes, kept: Kept, body: Body) -> None:
        self._graph = graph
        self._part = part
        self._kept = kept
        self._body = body
        self._names: dict[fx.Node, str] = {}
        self._used: set[str] = set(_RESERVED)
        self._module = ""
        self._place = ""

    def write(self) -> Body:
        part, body = self._part, self._body
        loss = self._graph.module.graph.output_node().args[0]
        if part.received:
            names = [self._new(node) for node in part.received]
            line = f"{', '.join(names)}{',' * (len(names) == 1)} = received"
            self._line(line if len(line) <= _STATEMENT_WIDTH else bracketed("(", names, ") = received", 0))
        for node, number in self._kept.given.items():
            self._line(f"{self._name(node)} = keep.given({number}, {self._name(node)})")
        self._block(self._graph.module, part.body, {*part.sent} or {loss}, 0)
        sent = [f"{self._name(node)}.contiguous()" for node in part.sent] or [self._name(loss)]
        self._line("")
        self._line(bracketed("return (", sent, ",)" if len(sent) == 1 else ")", _STATEMENT_WIDTH))
        if any(_DEVICE.search(line) for line in body.lines):
            body.lines.insert(0, "device = device_of(self, inputs, received)")
        return body

    def _block(self, module: nn.Module, nodes: Sequence[fx.Node], returned: set[Any], indent: int) -> None:
        """Write the statements of nodes; each value is deleted behind its last use, lest it lives on.

        `module` holds the nodes, and the graphs that some of them run; `returned` values are needed afterwards.
        """
        done_with = _last_uses(nodes, returned)
        for node in nodes:
            self._comments(node, indent)
            self._load(node, indent)
            inner = indent
            if "ordinal" in node.meta:
                self._body.random.append(node.meta["ordinal"])
                self._line(f"with draws({node.meta['ordinal']}):", indent)
                inner += _INDENT
            if node.target in (_grad_enabled, _autocast):
                self._region(module, node, inner)
            else:
                self._statement(node, inner)
            if "output" in node.meta:
                self._line(f"keep.output({value_text(node.meta['output'], self._name)}, {self._name(node)})", indent)
            self._delete([source for source in done_with[node] if source in self._names], indent)

    def _statement(self, node: fx.Node, indent: int) -> None:
        kept, takes = node in self._kept.nodes, node.target is operator.getitem
        if takes and not kept:
            source, key = node.args
            self._line(f"{self._new(node)} = {self._name(source)}[{value_text(key, self._name)}]", indent)
            return
        called = "operator.getitem" if takes else _function_text(node.target, self._users_place(node))
        arguments = _argument_texts(node.args, node.kwargs, self._name)
        result = f"{self._new(node)} = " if node.users else ""
        if kept:
            called, arguments = "keep", [str(self._kept.nodes[node]), called, *arguments]
        self._line(bracketed(f"{result}{called}(", arguments, ")", _STATEMENT_WIDTH - indent), indent)

    def _region(self, module: nn.Module, node: fx.Node, indent: int) -> None:
        """Write an operation that runs a graph with gradients or precision switched as `with` and the graph's nodes."""
        if node in self._kept.nodes:
            raise StageCodeError(
                f"{self._users_place(node)}: what is computed with gradients or precision switched is not recomputed "
                "or swapped in part: make a plan with --optimize none"
            )
        at = node.args.index(_graph_of(node))
        switches = [value_text(switch, self._name) for switch in node.args[:at]]
        held, *given = node.args[at:]
        if node.target is _grad_enabled:
            self._line(f"with torch.set_grad_enabled({switches[0]}):", indent)
        else:
            self._line(f"with torch.autocast({', '.join(['device.type', *switches[1:]])}):", indent)
        inner = getattr(module, str(held.target))  # type: ignore[union-attr]
        placeholders = inner.graph.find_nodes(op="placeholder")
        for placeholder, value in zip(placeholders, given, strict=True):
            self._names[placeholder] = value_text(value, self._name)
        nodes = [of_inner for of_inner in inner.graph.nodes if of_inner.op == "call_function"]
        outputs = list(inner.graph.output_node().args[0])
        self._block(inner, nodes, {*outputs, *placeholders}, indent + _INDENT)
        self._line(f"{self._new(node)} = {value_text(tuple(outputs), self._name)}", indent + _INDENT)
        self._delete([output for output in dict.fromkeys(outputs) if output in nodes], indent + _INDENT)

    def _load(self, node: fx.Node, indent: int) -> None:
        """Write inputs that no statement has read yet; parameters have their own names wherever they are used."""
        for source in node.all_input_nodes:
            if source in self._names:
                continue
            if source.op == "placeholder":
                self._body.inputs.append(str(source.target))
                self._line(f"{self._new(source)} = inputs[{value_text(source.target, self._name)}]", indent)
            elif source.op == "get_attr" and source is not _graph_of(node):
                self._body.held.append(str(source.target))
                self._names[source] = "self" + "".join(map(_step_text, str(source.target).split(".")))

    def _comments(self, node: fx.Node, indent: int) -> None:
        """Write the module and the user's line, where they are others than those of the statement before."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if stack:
            name, kind = stack[-1]
            kind = kind if isinstance(kind, str) else kind.__name__
            module = f"{name or 'the model'}: {kind.rpartition('.')[2]}"
            if module != self._module:
                self._module, self._place = module, ""
                self._body.lines += [*([""] if not indent else []), f"{' ' * indent}# {module}"]
        place = self._users_place(node)
        if place not in (node.name, self._place):
            self._place = place
            self._line(f"# {place}", indent)

    def _users_place(self, node: fx.Node) -> str:
        """Return `FILE:LINE: code` of the user's, with as little of the path as is unique; else the node's name."""
        frame = users_frame(node)
        if frame is None:
            return node.name
        file, line, code = frame
        parts = Path(file).parts
        names = ("/".join(parts[-count:]) for count in range(1, len(parts) + 1))
        name = next(name for name in names if self._body.files.setdefault(name, file) == file)  # a path names itself
        return f"{name}:{line}: {code}"

    def _delete(self, nodes: Sequence[fx.Node], indent: int) -> None:
        names = [self._names[node] for node in nodes if node.op != "get_attr"]
        if names:
            self._line(f"del {', '.join(names)}", indent)

    def _line(self, lines: str, indent: int = 0) -> None:
        self._body.lines += [" " * indent + line for line in lines.split("\n")]

    def _name(self, node: Any) -> str:
        return self._names[node]

    def _new(self, node: fx.Node) -> str:
        name = node.name
        while name in self._used:
            name += "_"
        self._used.add(name)
        self._names[node] = name
        return name


def _graph_of(node: fx.Node) -> Any:
    """Return what holds the graph that the node runs: its first argument that is no switch; None of other nodes."""
    if node.target not in (_grad_enabled, _autocast):
        return None
    return next(argument for argument in node.args if isinstance(argument, fx.Node))


def _last_uses(nodes: Sequence[fx.Node], returned: set[Any]) -> dict[fx.Node, list[fx.Node]]:
    """Return what each node is the last to use, itself if none does."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            last[source] = node
        if node.users:
            last[node] = node
    done: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for source, node in last.items():
        if source not in returned:
            done[node].append(source)
    return done


def value_text(value: Any, name: Name) -> str:
    """Return an argument as Python text; a device is the part's, wherever the model was traced."""

    def text(part: Any) -> str:
        return value_text(part, name)

    match value:
        case fx.Node():
            return name(value)
        case torch.device():
            return "device"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case float():
            return repr(value).replace("e+", "e") if math.isfinite(value) else f'float("{value}")'
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case slice():
            return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
        case tuple():
            return bracketed("(", [*map(text, value)], ",)" if len(value) == 1 else ")")
        case list():
            return bracketed("[", [*map(text, value)], "]")
        case None | bool() | int() | complex():
            return repr(value)
    if value is ...:
        return "..."
    raise StageCodeError(f"an argument of type {type(value).__name__} has no text: leave it out of the model's forward")


def bracketed(opening: str, parts: Sequence[str], closing: str, width: int | None = None) -> str:
    """On one line; where it would be longer than `width`, the parts on one of their own, or on one each."""
    inner = ", ".join(parts)
    line = f"{opening}{inner}{closing}"
    if width is None or len(line) <= width:
        return line
    if 4 + len(inner) <= width:
        return f"{opening}\n    {inner}\n{closing}"
    return "\n".join([opening, *(f"    {part}," for part in parts), closing.lstrip(",")])


def _function_text(target: Any, where: str) -> str:
    """`where`: the operation's place in the user's code, for the error about one that has no name."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name if target.namespace == "aten" else f"torch.ops.{name}"
    raise StageCodeError(f"{where}: {target} cannot be written as code of a stage")


def _argument_texts(args: Sequence[Any], kwargs: Mapping[str, Any], name: Name) -> list[str]:
    """Return the arguments without those that say what is so anyway."""
    named = {
        key: value
        for key, value in kwargs.items()
        if not (key == "pin_memory" and value is False) and value is not torch.strided
    }
    return [*(value_text(value, name) for value in args), *(f"{k}={value_text(v, name)}" for k, v in named.items())]


def _step_text(step: str) -> str:
    """Return how a part goes to a child of the model: `transformer.h.0` is `self.transformer.h[0]`."""
    if step.isdecimal() and str(int(step)) == step:
        return f"[{step}]"
    return f".{step}" if step.isidentifier() and not keyword.iskeyword(step) else f"[{json.dumps(step)}]"
