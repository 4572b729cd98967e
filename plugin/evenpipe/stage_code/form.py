"""Which Python stage code may be: operations on tensors, in the form that `write_stages` gives it, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Final

import torch

from evenpipe.stage_code.part import Part, StageCodeError

__all__ = ["check_form"]

_IMPORTS: Final = ("import torch", "import operator", "aten = torch.ops.aten")
_IMPORTED: Final = {"Boundary", "Keeping", "Part", "device_of"}
_TABLES: Final = {name for name in Part.__annotations__ if name.isupper()}
_SIGNATURE: Final = "self, inputs, draws, keep, *received"
_DEVICE: Final = "device = device_of(self, inputs, received)"
#: Names that a statement must not give to anything else.
_RESERVED: Final = {"self", "inputs", "draws", "keep", "received", "aten", "torch", "operator", "device_of", "float"}
#: What is called with values: in tables, and as an argument of an operation.
_OF_TABLES: Final = {"Boundary", "Keeping", "torch.tensor"}
_OF_ARGUMENTS: Final = {"slice"}
_REMEDY: Final = "read the file, and trust it if it is yours (evenpipe train --trust, PlannedPipeline(trust=True))"
#: Characters that hide text from a reader, or steer a terminal when an error quotes a line.
_HIDDEN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
#: ATen's operators that reach beyond tensors: to a file, and to the terminal.
_BEYOND: Final = {"from_file", "_print"}


def check_form(source: str, where: str) -> None:
    """Raise StageCodeError for the first line that is no operation on tensors, as a plan from a stranger may have.

    Stage code that passes cannot import, open, start or send anything, nor call what is not an operator of torch. Its
    operators are ATen's, or others that this process has registered and that take no text (a file, a name).
    `where`: the file, which the message begins with.
    """
    if hidden := _HIDDEN.search(source):
        number = source.count("\n", 0, hidden.start()) + 1
        raise StageCodeError(f"{where}:{number}: has the character {hidden[0]!a}, and is not executed: {_REMEDY}")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise StageCodeError(f"{where}: {type(error).__name__}: this is no Python") from error
    try:
        for statement in tree.body:
            _of_module(statement)
    except _OtherError as found:
        node = found.args[0]
        line = (ast.get_source_segment(source, node) or "").split("\n")[0][:80]
        raise StageCodeError(
            f"{where}:{getattr(node, 'lineno', 1)}: `{line}` is no operation on tensors, and is not executed: {_REMEDY}"
        ) from None
    except RecursionError as error:
        raise StageCodeError(f"{where}: its expressions are nested too deeply, and are not executed") from error


class _OtherError(Exception):
    """A node of another form."""


def _require(holds: object, node: ast.AST) -> None:
    if not holds:
        raise _OtherError(node)


def _of_module(node: ast.stmt) -> None:
    match node:
        case ast.Expr(ast.Constant(str())):
            return
        case ast.Import() | ast.Assign([ast.Name("aten")]):
            _require(ast.unparse(node) in _IMPORTS, node)
        case ast.ImportFrom("evenpipe.stage_code", names, 0):
            _require(all(one.name in _IMPORTED and one.asname is None for one in names), node)
        case ast.Assign([ast.Name("PLAN" | "FILES")], value):
            _table(value)
        case ast.Assign([ast.Name("PARTS")], ast.Tuple(elements)):
            _require(all(isinstance(one, ast.Name) and _is_part(one.id) for one in elements), node)
        case ast.ClassDef(name, [ast.Name("Part")], [], body, []):
            _require(_is_part(name), node)
            for statement in body:
                _of_class(statement)
        case _:
            raise _OtherError(node)


def _is_part(name: str) -> bool:
    return re.fullmatch(r"Part\d+", name) is not None


def _of_class(node: ast.stmt) -> None:
    match node:
        case ast.Expr(ast.Constant(str())):
            return
        case ast.Assign([ast.Name(name)], value) if name in _TABLES:
            _table(value)
        case ast.FunctionDef("forward", arguments, body, [], None):
            _require(ast.unparse(arguments) == _SIGNATURE, node)
            _Forward(node).check(body)
        case _:
            raise _OtherError(node)


def _table(node: ast.expr) -> None:
    _value(node, _OF_TABLES)


def _value(node: ast.expr, calls: set[str]) -> None:
    """Values without names: literals, torch's dtypes, layouts and memory formats, and calls of `calls` with these."""
    match node:
        case ast.Constant():
            return
        case ast.UnaryOp(ast.USub(), ast.Constant()):
            return
        case ast.BinOp(left, ast.Add() | ast.Sub(), ast.Constant(complex())):
            _value(left, set())
        case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements):
            for one in elements:
                _value(one, calls)
        case ast.Dict(keys, values):
            _require(None not in keys, node)
            for entry in (*filter(None, keys), *values):
                _value(entry, calls)
        case ast.Attribute(ast.Name("torch"), name):
            kinds = (torch.dtype, torch.layout, torch.memory_format)
            _require(not name.startswith("_") and isinstance(getattr(torch, name, None), kinds), node)
        case ast.Call(ast.Name("float"), [ast.Constant(str())], []):
            return
        case ast.Call(function, arguments, keywords) if ast.unparse(function) in calls:
            for one in (*arguments, *(keyword.value for keyword in keywords)):
                _value(one, calls)
            _require(all(keyword.arg for keyword in keywords), node)
        case _:
            raise _OtherError(node)


class _Forward:
    """One part's forward; names are those that it assigns, and what it is given."""

    def __init__(self, function: ast.FunctionDef) -> None:
        stored = (one for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        self._names = {"received"}
        for one in stored:
            _require(one.id not in _RESERVED and not one.id.startswith("__"), one)
            self._names.add(one.id)

    def check(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign([ast.Name("device")], _):
                _require(ast.unparse(node) == _DEVICE, node)
            case ast.Assign([target], value):
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                _require(all(isinstance(one, ast.Name) for one in names), node)
                self._result(value)
            case ast.Expr(value):
                self._result(value)
            case ast.Delete(targets):
                _require(all(isinstance(one, ast.Name) for one in targets), node)
            case ast.With([ast.withitem(context, None)], body):
                self._context(context)
                self.check(body)
            case ast.Return(ast.Tuple(elements)):
                for one in elements:
                    contiguous = isinstance(one, ast.Call) and ast.unparse(one).endswith(".contiguous()")
                    self._argument(one.func.value if contiguous else one)  # type: ignore[attr-defined]
            case _:
                raise _OtherError(node)

    def _context(self, node: ast.expr) -> None:
        match node:
            case ast.Call(ast.Name("draws"), [ast.Constant(int())], []):
                return
            case ast.Call(ast.Attribute(ast.Name("torch"), "set_grad_enabled"), [ast.Constant(bool())], []):
                return
            case ast.Call(
                ast.Attribute(ast.Name("torch"), "autocast"), [ast.Attribute(ast.Name("device"), "type"), *rest], []
            ):
                for one in rest:
                    _value(one, set())
            case _:
                raise _OtherError(node)

    def _result(self, node: ast.expr) -> None:
        """What a statement computes: an operation, alone or through `keep`, or a value."""
        match node:
            case ast.Call(ast.Name("keep"), [ast.Constant(int()), operation, *arguments], keywords):
                self._operation(operation)
                self._arguments(arguments, keywords)
            case ast.Call(ast.Attribute(ast.Name("keep"), "given" | "output"), arguments, keywords):
                self._arguments(arguments, keywords)
            case ast.Call(ast.Attribute() as operation, arguments, keywords):
                self._operation(operation)
                self._arguments(arguments, keywords)
            case _:
                self._argument(node)

    def _arguments(self, arguments: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> None:
        for keyword in keywords:
            _require(keyword.arg, keyword.value)
        for one in (*arguments, *(keyword.value for keyword in keywords)):
            self._argument(one)

    def _argument(self, node: ast.expr) -> None:
        match node:
            case ast.Name(name):
                _require(name in self._names, node)
            case ast.Tuple(elements) | ast.List(elements):
                for one in elements:
                    self._argument(one)
            case ast.Subscript(ast.Name("inputs"), ast.Constant(str())):
                return
            case ast.Attribute() | ast.Subscript() if _is_of_self(node):
                return
            case ast.Subscript(ast.Name() as of, key):
                self._argument(of)
                self._argument(key)
            case ast.Call(ast.Name("slice"), arguments, []):
                self._arguments(arguments, [])
            case _:
                _value(node, _OF_ARGUMENTS)

    def _operation(self, node: ast.expr) -> None:
        """`aten.NAME.OVERLOAD`, `torch.ops.SPACE.NAME.OVERLOAD` or `operator.getitem`."""
        text = ast.unparse(node)
        if text == "operator.getitem":
            return
        found = re.fullmatch(r"(?:aten|torch\.ops\.(\w+))\.(\w+)\.(\w+)", text)
        _require(found is not None, node)
        assert found is not None
        space, name, overload = found[1] or "aten", found[2], found[3]
        takes_text = _takes_text(f"{space}::{name}", "" if overload == "default" else overload)
        _require(takes_text is False or (takes_text and space == "aten" and name not in _BEYOND), node)


def _is_of_self(node: ast.expr) -> bool:
    """Return whether it is `self`, or a name or number below it."""
    match node:
        case ast.Name("self"):
            return True
        case ast.Attribute(of, name):
            return not name.startswith("__") and _is_of_self(of)
        case ast.Subscript(of, ast.Constant(int() | str() as key)):
            return not str(key).startswith("__") and _is_of_self(of)
    return False


def _takes_text(name: str, overload: str) -> bool | None:
    """Return whether an operator that this process knows takes any text; None of another name."""
    if overload.startswith("__") or not torch._C._dispatch_has_kernel(f"{name}.{overload}" if overload else name):
        return None
    schema = torch._C._get_schema(name, overload)
    return any("str" in str(argument.type) for argument in schema.arguments)
