"""The statements of a part's forward."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn

from evenpipe.partition.code import text
from evenpipe.partition.code.errors import StageCodeError
from evenpipe.partition.code.keeping import Kept
from evenpipe.partition.code.selecting import Selected
from evenpipe.partition.trace import Graph

__all__ = ["Body", "write_body"]

_TAKEN: Final = ("self", "inputs", "draws", "received", "keep", "device", "device_of", "aten", "torch", *keyword.kwlist)
_FRAME: Final = re.compile(r'File "(.+)", line (\d+).*\n *(.*)')
_TORCH: Final = str(Path(torch.__file__).parent)
_INDENT: Final = 4
_WIDTH: Final = text.WIDTH - 2 * _INDENT  # of a method's statements
_DEVICE: Final = re.compile(r"^ *[^# ].*\bdevice\b")
_grad_enabled: Final = torch.ops.higher_order.wrap_with_set_grad_enabled
_autocast: Final = torch.ops.higher_order.wrap_with_autocast


@dataclass
class Body:
    """Lines, without the indentation of a method; what they read; and the files that their comments name."""

    lines: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    random: list[int] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def write_body(graph: Graph, part: Selected, kept: Kept, files: Mapping[str, str]) -> Body:
    """`kept`: what is called through `keep`. `files`: names that other parts' comments gave to files of the user's."""
    return _Writer(graph, part, kept, Body(files=dict(files))).write()


class _Writer:
    def __init__(self, graph: Graph, part: Selected, kept: Kept, body: Body) -> None:
        self._graph = graph
        self._part = part
        self._kept = kept
        self._body = body
        self._names: dict[fx.Node, str] = {}
        self._used: set[str] = set(_TAKEN)
        self._module = ""
        self._place = ""

    def write(self) -> Body:
        part, body = self._part, self._body
        loss = next(node for node in self._graph.module.graph.nodes if node.op == "output").args[0]
        kept = {*part.sent} or {loss}
        if part.received:
            names = [self._new(node) for node in part.received]
            line = f"{', '.join(names)}{',' * (len(names) == 1)} = received"
            self._line(line if len(line) <= _WIDTH else text.bracketed("(", names, ") = received", 0))
        for node, number in self._kept.given.items():
            self._line(f"{self._name(node)} = keep.given({number}, {self._name(node)})")
        self._block(self._graph.module, part.body, kept, 0)
        sent = [f"{self._name(node)}.contiguous()" for node in part.sent] or [f"{self._name(loss)}"]
        self._line("")
        self._line(text.bracketed("return (", sent, ",)" if len(sent) == 1 else ")", _WIDTH))
        if any(_DEVICE.search(line) for line in body.lines):
            body.lines.insert(0, "device = device_of(self, inputs, received)")
        return body

    def _block(self, module: nn.Module, nodes: Sequence[fx.Node], kept: set[Any], indent: int) -> None:
        """Statements of nodes; each value is deleted behind the last that uses it, lest it lives on.

        `module`: what they are in, which holds the graphs that some of them run.
        """
        done_with = _last_uses(nodes, kept)
        for node in nodes:
            self._comments(node, indent)
            self._load(node, indent)
            around = self._around(node)
            if around:
                self._line(f"with {', '.join(around)}:", indent)
            self._statement(module, node, indent + _INDENT * bool(around))
            if "output" in node.meta:
                self._line(f"keep.output({text.value(node.meta['output'], self._name)}, {self._name(node)})", indent)
            self._delete([source for source in done_with[node] if source in self._names], indent)

    def _around(self, node: fx.Node) -> list[str]:
        """The context managers that a node runs in: the place for whatever is to happen around one."""
        if "ordinal" not in node.meta:
            return []
        self._body.random.append(node.meta["ordinal"])
        return [f"draws({node.meta['ordinal']})"]

    def _statement(self, module: nn.Module, node: fx.Node, indent: int) -> None:
        if node.target in (_grad_enabled, _autocast):
            self._region(module, node, indent)
        elif node in self._kept.nodes:
            self._kept_statement(node, indent)
        elif node.target is operator.getitem:
            source, key = node.args
            taken = f"{self._name(source)}[{text.value(key, self._name)}]"
            self._line(f"{self._new(node)} = {taken}", indent)
        else:
            called = text.function(node.target, self._short_place(node) or node.name)
            parts = text.arguments(node.args, node.kwargs, self._name)
            result = f"{self._new(node)} = " if node.users else ""
            self._line(text.bracketed(f"{result}{called}(", parts, ")", _WIDTH - indent), indent)

    def _kept_statement(self, node: fx.Node, indent: int) -> None:
        taken = node.target is operator.getitem
        called = "operator.getitem" if taken else text.function(node.target, self._short_place(node) or node.name)
        parts = [str(self._kept.nodes[node]), called, *text.arguments(node.args, node.kwargs, self._name)]
        result = f"{self._new(node)} = " if node.users else ""
        self._line(text.bracketed(f"{result}keep(", parts, ")", _WIDTH - indent), indent)

    def _region(self, module: nn.Module, node: fx.Node, indent: int) -> None:
        """An operation that runs a graph of its own, with gradients or precision switched, as `with` and its nodes."""
        if node in self._kept.nodes:
            raise StageCodeError(
                f"{self._short_place(node) or node.name}: what is computed with gradients or precision switched is not "
                "recomputed or swapped in part: make a plan with --optimize none"
            )
        at = node.args.index(_graph_of(node))
        switches = [text.value(of, self._name) for of in node.args[:at]]
        held, *given = node.args[at:]
        if node.target is _grad_enabled:
            self._line(f"with torch.set_grad_enabled({switches[0]}):", indent)
        else:
            self._line(f"with torch.autocast({', '.join(['device.type', *switches[1:]])}):", indent)
        inner = getattr(module, str(held.target))  # type: ignore[union-attr]
        placeholders = [one for one in inner.graph.nodes if one.op == "placeholder"]
        for placeholder, of in zip(placeholders, given, strict=True):
            self._names[placeholder] = text.value(of, self._name)
        nodes = [one for one in inner.graph.nodes if one.op == "call_function"]
        outputs = list(next(one for one in inner.graph.nodes if one.op == "output").args[0])
        self._block(inner, nodes, {*outputs, *placeholders}, indent + _INDENT)
        self._line(f"{self._new(node)} = {text.value(tuple(outputs), self._name)}", indent + _INDENT)
        self._delete([one for one in dict.fromkeys(outputs) if one in nodes], indent + _INDENT)

    def _load(self, node: fx.Node, indent: int) -> None:
        """Inputs that no statement has read yet; parameters have their own names wherever they are used."""
        for source in node.all_input_nodes:
            if source in self._names:
                continue
            if source.op == "placeholder":
                self._body.inputs.append(str(source.target))
                self._line(f"{self._new(source)} = inputs[{text.value(source.target, self._name)}]", indent)
            elif source.op == "get_attr" and source is not _graph_of(node):
                self._body.held.append(str(source.target))
                self._names[source] = text.path(str(source.target))

    def _comments(self, node: fx.Node, indent: int) -> None:
        """The module and the user's line, where they are others than those of the statement before."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if stack:
            name, kind = stack[-1]
            kind = kind if isinstance(kind, str) else kind.__name__
            module = f"{name or 'the model'}: {kind.rpartition('.')[2]}"
            if module != self._module:
                self._module, self._place = module, ""
                self._body.lines += [*([""] if not indent else []), f"{' ' * indent}# {module}"]
        place = self._short_place(node)
        if place and place != self._place:
            self._place = place
            self._line(f"# {place}", indent)

    def _short_place(self, node: fx.Node) -> str:
        place = _place(node)
        if place is None:
            return ""
        file, line, code = place
        files = self._body.files
        parts = Path(file).parts
        for count in range(1, len(parts) + 1):
            name = "/".join(parts[-count:])
            if files.setdefault(name, file) == file:
                return f"{name}:{line}: {code}"
        raise AssertionError(file)  # a path names itself

    def _delete(self, nodes: Sequence[fx.Node], indent: int) -> None:
        names = [self._names[node] for node in nodes if node.op != "get_attr"]
        if names:
            self._line(f"del {', '.join(names)}", indent)

    def _line(self, line: str, indent: int = 0) -> None:
        self._body.lines += [" " * indent + one for one in line.split("\n")]

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
    """What holds the graph that it runs: the first of its arguments that is none of its switches; None for others."""
    if node.target not in (_grad_enabled, _autocast):
        return None
    return next(of for of in node.args if isinstance(of, fx.Node))


def _last_uses(nodes: Sequence[fx.Node], kept: set[Any]) -> dict[fx.Node, list[fx.Node]]:
    """What each node is the last to use, itself if none does."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            last[source] = node
        if node.users:
            last[node] = node
    done: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for source, node in last.items():
        if source not in kept:
            done[node].append(source)
    return done


def _place(node: fx.Node) -> tuple[str, str, str] | None:
    """File, line and source of the innermost call outside torch that the node comes from."""
    frames: list[tuple[str, str, str]] = _FRAME.findall(node.meta.get("stack_trace") or "")
    return next((frame for frame in reversed(frames) if not frame[0].startswith(_TORCH)), None)
