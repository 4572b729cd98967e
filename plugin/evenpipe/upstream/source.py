"""The signature, or the value, of a symbol in a source tree, read from the text without importing anything."""

from __future__ import annotations

import ast
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, TypeAlias

from evenpipe.upstream.parsed import Class, Found, Function, Module, Unreadable, Value, decorators_of
from evenpipe.upstream.symbols import BUILTIN, PRESENT, UpstreamError, module_of

__all__ = ["Read", "found_in", "literal_in", "signature_in"]

Read: TypeAlias = dict[str, Module]
"""The modules of one folder that have been read, by name: to be read once."""


def found_in(root: Path, symbol: str, expected: str, read: Read) -> str:
    """Return what is to be compared with what is `expected` of "module.path:attribute.path" in the folder `root`.

    It is the signature, or PRESENT where no more than that is expected. Raises UpstreamError as `signature_in` does.
    """
    if expected != PRESENT:
        return signature_in(root, symbol, read)
    try:
        scope, name = _scope(root, symbol, read)
        if not scope.binds(name):
            where = scope.path if isinstance(scope, Module) else f"{scope.node.name} in {scope.module.path}"
            raise Unreadable(f"{where} has no {name}")
    except Unreadable as error:
        raise UpstreamError(f"{symbol}: {error}: use an unmodified supported release") from None
    return PRESENT


def signature_in(root: Path, symbol: str, read: Read | None = None) -> str:
    """What `signature_of` says of "module.path:attribute.path" imported from the folder `root`, read from its source.

    Decorators are taken to keep the signature, as functools.wraps does. Where `if` or `try` choose between definitions,
    those from outside of `root` are left out. A data class is read by its fields, if none takes keywords only. Raises
    UpstreamError, in one line, for what is missing or cannot be told from the source.
    """
    try:
        scope, name = _scope(root, symbol, {} if read is None else read)
        texts = sorted({_text(found, isinstance(scope, Class)) for found in scope.find(name)})
        if len(texts) > 1:
            raise Unreadable(f"has one of the signatures {' and '.join(texts)}, which only an import can tell")
    except Unreadable as error:
        raise UpstreamError(f"{symbol}: {error}: use an unmodified supported release") from None
    return texts[0]


def literal_in(root: Path, symbol: str) -> Any:
    """The literal that "module.path:NAME" is in the folder `root`. Raises UpstreamError where it is something else."""
    try:
        [found] = Module.named(root, module_of(symbol), {}).find(symbol.partition(":")[2])
        if not isinstance(found, Value):
            raise Unreadable("is no value")
        return found.literal()
    except Unreadable as error:
        raise UpstreamError(f"{symbol}: {error}: use an unmodified supported release") from None


def _scope(root: Path, symbol: str, read: Read) -> tuple[Module | Class, str]:
    """What the last name of `symbol` is looked for in, and that name."""
    *owners, name = symbol.partition(":")[2].split(".")
    scope: Module | Class = Module.named(root, module_of(symbol), read)
    for owner in owners:
        scope = _class(scope, owner)
    return scope, name


def _class(scope: Module | Class, name: str) -> Class:
    found = scope.find(name)
    if len(found) > 1 or not isinstance(found[0], Class):
        raise Unreadable(f"{name} is not one class")
    return found[0]


def _text(found: Found, in_class: bool) -> str:
    if isinstance(found, Value):
        if isinstance(found.node, ast.Dict):
            return BUILTIN
        raise Unreadable(f"is made by {ast.unparse(found.node)} in {found.module.path}, which has to be run")
    if isinstance(found, Class):
        return str(Signature(_constructor(found)))
    if "property" in decorators_of(found):
        return BUILTIN
    parameters = _parameters(found)
    bound = in_class and "classmethod" in decorators_of(found)
    return str(Signature(parameters[1:] if bound else parameters))


def _parameters(function: Function) -> list[Parameter]:
    given = function.node.args
    positional = [
        *((argument, Parameter.POSITIONAL_ONLY) for argument in given.posonlyargs),
        *((argument, Parameter.POSITIONAL_OR_KEYWORD) for argument in given.args),
    ]
    defaults = [*([None] * (len(positional) - len(given.defaults))), *given.defaults]
    parameters = [
        Parameter(argument.arg, kind, default=_default(function.module, default))
        for (argument, kind), default in zip(positional, defaults, strict=True)
    ]
    if given.vararg:
        parameters.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=_default(function.module, default)))
    if given.kwarg:
        parameters.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
    return parameters


def _default(module: Module, expression: ast.expr | None) -> Any:
    return Parameter.empty if expression is None else Value(module, expression).literal()


def _constructor(definition: Class) -> list[Parameter]:
    """The parameters of a class: those of the first __new__ or __init__ in its lineage, or made from its fields."""
    for ancestor in definition.lineage():
        for found in (*ancestor.own("__new__"), *ancestor.own("__init__")):
            if isinstance(found, Function):
                return _parameters(found)[1:]
        if "dataclass" in decorators_of(ancestor):
            return _fields(ancestor)
    return []


class _Factory:
    """Stands, as in data classes, for a default that is made anew each time."""

    def __repr__(self) -> str:
        return "<factory>"


def _fields(definition: Class) -> list[Parameter]:
    """The parameters of the __init__ that a data class gets: bases' fields first, a redefined one in its old place."""
    fields: dict[str, Parameter | None] = {}
    for ancestor in reversed([*definition.lineage()]):
        for statement in ancestor.node.body if "dataclass" in decorators_of(ancestor) else ():
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name, annotation = statement.target.id, ast.unparse(statement.annotation)
                if not annotation.removeprefix("typing.").startswith("ClassVar"):
                    fields[name] = _field(ancestor.module, name, statement.value)
    return [parameter for parameter in fields.values() if parameter is not None]


def _field(module: Module, name: str, value: ast.expr | None) -> Parameter | None:
    """None for a field that __init__ does not take."""
    default = value
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        options = {keyword.arg: keyword.value for keyword in value.keywords}
        if "kw_only" in options:
            raise Unreadable(f"{name} is a field that takes a keyword only")
        if "init" in options and not Value(module, options["init"]).literal():
            return None
        if "default_factory" in options:
            return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=_Factory())
        default = options.get("default")
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=_default(module, default))
