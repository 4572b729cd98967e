"""Read the signature or the value of a symbol from a source tree, without importing anything."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, TypeAlias

from evenpipe.upstream.symbols import BUILTIN, PRESENT, UpstreamError, module_of

__all__ = [
    "Class",
    "Found",
    "Function",
    "Module",
    "Read",
    "Unreadable",
    "Value",
    "decorators_of",
    "found_in",
    "literal_in",
    "path_of",
    "signature_in",
]


class Unreadable(Exception):
    """Something that is not in the source, or cannot be told from it; one line without the symbol's name."""


@dataclass(frozen=True)
class Function:
    """A function or method, as it is defined."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Value:
    """Anything else that a name is bound to, as the expression that makes it."""

    module: Module
    node: ast.expr

    def literal(self) -> Any:
        """Return the value of a literal, or of a name that is bound to one. Raises Unreadable for other expressions."""
        try:
            return ast.literal_eval(self.node)
        except ValueError:
            if isinstance(self.node, ast.Name):
                found = self.module.find(self.node.id)
                if len(found) == 1 and isinstance(found[0], Value):
                    return found[0].literal()
            raise Unreadable(
                f"{ast.unparse(self.node)} in {self.module.path} cannot be told without running it"
            ) from None


@dataclass(frozen=True)
class Class:
    """A class, as it is defined."""

    module: Module
    node: ast.ClassDef

    def own(self, name: str) -> list[Found]:
        """Return what the class itself binds `name` to; several where a condition decides."""
        return [_found(self.module, statement, name) for statement in _binding(self.node.body, name)]

    def find(self, name: str) -> list[Found]:
        """Return the same, looked for in the base classes too. Raises Unreadable where it is in none."""
        for definition in self.lineage():
            if found := definition.own(name):
                return found
        raise Unreadable(f"{self.node.name} in {self.module.path} has no {name}")

    def binds(self, name: str) -> bool:
        """Return whether the class, or a base in the tree, has `name`, or a method of theirs sets it on anything."""
        if _binding(self.node.body, name):
            return True
        sets = (node for node in ast.walk(self.node) if isinstance(node, ast.Attribute) and node.attr == name)
        return any(isinstance(node.ctx, ast.Store) for node in sets) or any(base.binds(name) for base in self._bases())

    def _bases(self) -> Iterator[Class]:
        for base in self.node.bases:
            with contextlib.suppress(Unreadable):
                yield from (found for found in self.module.find(ast.unparse(base)) if isinstance(found, Class))

    def lineage(self) -> Iterator[Class]:
        """The class and its bases, depth first. Raises Unreadable where a base is not in the tree."""
        yield self
        for base in self.node.bases:
            if not isinstance(base, ast.Name):
                raise Unreadable(f"{self.node.name} in {self.module.path} has base {ast.unparse(base)}")
            for found in self.module.find(base.id):
                if isinstance(found, Class):
                    yield from found.lineage()


Found: TypeAlias = Function | Class | Value


def decorators_of(definition: Function | Class) -> set[str]:
    """Return the last parts of the decorators' names."""
    return _last_names(definition.node.decorator_list)


@dataclass(frozen=True)
class Module:
    """A file of the tree; `read` are those of the tree that have been read, by name."""

    root: Path
    name: str
    path: Path
    body: Sequence[ast.stmt]
    read: dict[str, Module] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def named(cls, root: Path, name: str, read: dict[str, Module]) -> Module:
        """Return the module of that name in the folder `root`, or among what was `read` of it, which it joins.

        Raises Unreadable where there is none, or no Python in it.
        """
        if name in read:
            return read[name]
        path = path_of(root, name)
        if path is None:
            raise Unreadable(f"there is no {root.joinpath(*name.split('.'))}.py")
        try:
            read[name] = cls(root, name, path, ast.parse(path.read_bytes()).body, read)
        except (OSError, SyntaxError, ValueError) as error:
            raise Unreadable(f"{path} cannot be read ({error})") from None
        return read[name]

    def binds(self, name: str) -> bool:
        """Return whether `name` is bound, whatever to, or is a module inside; imports from the tree are followed."""
        for statement in _binding(self.body, name):
            if not isinstance(statement, ast.ImportFrom):
                return True
            module, original = self._imported(statement), _original(statement, name)
            if path_of(self.root, module) is None:
                return True
            if Module.named(self.root, module, self.read).binds(original):
                return True
        return path_of(self.root, f"{self.name}.{name}") is not None

    def find(self, name: str) -> list[Found]:
        """Return what `name` is bound to, seen through assignments and imports; several where a condition decides.

        Leaves out what comes from outside of the tree, where something else is left. Raises Unreadable when nothing is.
        """
        found: list[Found] = []
        missing = f"{name} is not in {self.path}"
        for statement in _binding(self.body, name):
            try:
                found += self._followed(statement, name)
            except Unreadable as error:
                missing = str(error)
        if not found:
            raise Unreadable(missing)
        return found

    def _followed(self, statement: ast.stmt, name: str) -> list[Found]:
        if isinstance(statement, ast.ImportFrom):
            module, original = self._imported(statement), _original(statement, name)
            if path_of(self.root, module) is None:
                raise Unreadable(f"{name} in {self.path} comes from {module}, which is not in {self.root}")
            return Module.named(self.root, module, self.read).find(original)
        found = _found(self, statement, name)
        if isinstance(found, Value) and isinstance(found.node, ast.Name) and found.node.id != name:
            return self.find(found.node.id)
        return [found]

    def _imported(self, statement: ast.ImportFrom) -> str:
        """Return the full name of the module that an import takes from."""
        if statement.level == 0:
            return statement.module or ""
        up = statement.level - (self.path.name == "__init__.py")
        package = self.name.split(".")[: -up or None]
        return ".".join([*package, *([statement.module] if statement.module else [])])


def path_of(root: Path, module: str) -> Path | None:
    """Return the file of a module in the folder `root`; None where there is none."""
    bare = root.joinpath(*module.split("."))
    return next((path for path in (bare / "__init__.py", bare.with_name(f"{bare.name}.py")) if path.is_file()), None)


def _original(statement: ast.ImportFrom, name: str) -> str:
    [original] = [alias.name for alias in statement.names if (alias.asname or alias.name) == name]
    return original


def _found(module: Module, statement: ast.stmt, name: str) -> Found:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return Function(module, statement)
    if isinstance(statement, ast.ClassDef):
        return Class(module, statement)
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        return Value(module, statement.value)
    raise Unreadable(f"{name} in {module.path} is no function, class or value")


def _binding(body: Sequence[ast.stmt], name: str) -> list[ast.stmt]:
    """Return the statements one of which binds `name`: the last, and those in branches after it."""
    found: list[ast.stmt] = []
    for statement in body:
        if name in _names(statement):
            found = [statement]
        else:
            for branch in _branches(statement):
                found += _binding(branch, name)
    return found


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _branches(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    if isinstance(statement, ast.If) and _last_names([statement.test]) != {"TYPE_CHECKING"}:
        yield from (statement.body, statement.orelse)
    elif isinstance(statement, ast.Try):
        yield from (statement.body, *(handler.body for handler in statement.handlers), statement.orelse)


def _last_names(expressions: Sequence[ast.expr]) -> set[str]:
    """`f` for each of f, m.f and m.f(...)."""
    bare = [each.func if isinstance(each, ast.Call) else each for each in expressions]
    return {ast.unparse(each).rpartition(".")[2] for each in bare}


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
    """Return the signature of "module.path:attribute.path" in the folder `root`, read from its source.

    The text is what `signature_of` says of the symbol when it is imported from there. Decorators are taken to keep the
    signature, as functools.wraps does. Where `if` or `try` choose between definitions, those from outside of `root` are
    left out. A data class is read by its fields, if none takes keywords only. Raises UpstreamError, in one line, for
    what is missing or cannot be told from the source.
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
    """Return what the last name of `symbol` is looked for in, and that name."""
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
