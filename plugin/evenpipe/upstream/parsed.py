"""A source tree as its text has it: what a name in a module or a class is bound to, found without importing."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Class", "Found", "Function", "Module", "Unreadable", "Value", "decorators_of", "path_of"]


class Unreadable(Exception):
    """What is not in the source, or cannot be told from it; one line without the symbol's name."""


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
        """The value of a literal, or of a name that is bound to one. Raises Unreadable for other expressions."""
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
        """What the class itself binds `name` to; several where a condition decides."""
        return [_found(self.module, statement, name) for statement in _binding(self.node.body, name)]

    def find(self, name: str) -> list[Found]:
        """The same, looked for in the base classes too. Raises Unreadable where it is in none."""
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
        """Those in the tree."""
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
    """The last parts of the decorators' names."""
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
        """The module of that name in the folder `root`, or among what was `read` of it, which it joins.

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
        """What `name` is bound to, seen through assignments and imports; several where a condition decides.

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
        """The full name of the module that an import takes from."""
        if statement.level == 0:
            return statement.module or ""
        up = statement.level - (self.path.name == "__init__.py")
        package = self.name.split(".")[: -up or None]
        return ".".join([*package, *([statement.module] if statement.module else [])])


def path_of(root: Path, module: str) -> Path | None:
    """The file of a module in the folder `root`; None where there is none."""
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
    """The statements one of which binds `name`: the last, and those in branches after it."""
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
