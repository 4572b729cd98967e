"""Python state that a model's forward can reach: attributes, containers, helper objects, classes, globals, closures."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Leaf", "functions_of", "leaves_of", "restored"]

#: Number of references that are followed from one of the model's modules.
_DEPTH: Final = 5
#: Longer containers are described by their length.
_FEW: Final = 10_000
#: Packages whose classes, functions and globals are not looked into.
_FOREIGN: Final = sys.stdlib_module_names | {"torch", "numpy"}
_PRINTED: Final = (type(None), bool, int, float, complex, str, bytes, np.generic, torch.dtype, itertools.count)
_NAMESPACES: Final = (types.SimpleNamespace, argparse.Namespace)
#: Callables that hold other functions, and the attributes that do.
_WRAPPERS: Final = (
    *(types.MethodType, types.BuiltinMethodType, staticmethod, classmethod, property),
    *(functools.partial, functools.cached_property, functools._lru_cache_wrapper),
)
_WRAPPED: Final = ("__wrapped__", "__func__", "__self__", "fget", "func", "args", "keywords")


class Leaf(NamedTuple):
    """One value: in words, or a tensor with how often it and its weightless copy were changed in place."""

    words: str
    tensor: Tensor | None = None
    versions: tuple[int, ...] = ()


class _Holder(NamedTuple):
    """An object that holds others. `fields`: what it held when it was visited; `label`: the form of their names.

    `size`: the number of all that it held; None where `fields` are a part of that.
    """

    name: str
    owner: Any
    fields: dict[Any, Any]
    label: str = "{name}.{key}"
    size: int | None = None


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore afterwards the Python state that the model's forward can reach."""
    before = [holder for _, holders in _walk(model) for holder in holders]
    try:
        yield
    finally:
        for holder in before:
            _restore(holder)


def leaves_of(model: nn.Module, weightless: Callable[[Tensor], Tensor]) -> dict[str, list[Leaf]]:
    """Describe the Python state that the model's forward can reach, by names; several values may have one name.

    `weightless` returns the same copy for the same tensor. Each tensor is kept, so no later one has its identity.
    """
    leaves: dict[str, list[Leaf]] = {}
    for _, holders in _walk(model):
        for holder in holders:
            if holder.size is not None:
                leaves.setdefault(holder.name, []).append(Leaf(str(holder.size)))
            for key, value in holder.fields.items():
                leaves.setdefault(_name(holder, key), []).append(_leaf(value, weightless))
    return leaves


def functions_of(model: nn.Module) -> list[types.FunctionType]:
    """Return the functions that the model's forward can reach, nearest first."""
    return [value for value, _ in _walk(model) if isinstance(value, types.FunctionType)]


def _walk(model: nn.Module) -> Iterator[tuple[object, list[_Holder]]]:
    """Yield each object that the model's modules can reach once, nearest first, with what it holds."""
    modules = list(model.named_modules())
    queue: deque[tuple[str, object, int]] = deque((path, module, 0) for path, module in modules)
    # Parameters, buffers and modules are the graph's own.
    seen = {id(table) for _, module in modules for table in (module._parameters, module._buffers, module._modules)}
    while queue:
        name, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        holders = list(_opened(name, value))
        yield value, holders
        if depth < _DEPTH:
            for holder in holders:
                inner = ((_name(holder, key), field, depth + 1) for key, field in holder.fields.items())
                queue.extend(item for item in inner if not isinstance(item[1], (*_PRINTED, Tensor)))
            bases = (value if isinstance(value, type) else type(value)).__mro__
            queue.extend((base.__name__, base, depth + 1) for base in bases if not _foreign(base))


def _opened(name: str, value: object) -> Iterator[_Holder]:
    """Yield what an object holds: nothing for an object of torch's, NumPy's or the standard library's classes."""
    if isinstance(value, dict | list | tuple | deque | set | frozenset):
        yield _Holder(name, value, _contents(value), "{name}[{key!r}]", len(value))
    if isinstance(value, types.FunctionType):
        yield from () if _foreign(value) else _of_function(value)
    elif isinstance(value, type):
        if not _foreign(value):
            fields = {key: field for key, field in vars(value).items() if not key.startswith("__") or callable(field)}
            yield _Holder(name, value, fields)
    elif isinstance(value, _WRAPPERS):
        fields = {key: getattr(value, key) for key in _WRAPPED if hasattr(value, key)}
        yield _Holder(name, (), fields, "{name}")
    elif isinstance(value, (nn.Module, *_NAMESPACES)) or not _foreign(type(value)):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield _Holder(name, attributes, dict(attributes), size=len(attributes))
        slots = {key for base in type(value).__mro__ for key in _slots(base) if hasattr(value, key)}
        if slots:
            yield _Holder(name, value, {key: getattr(value, key) for key in sorted(slots)})


def _contents(value: Any) -> dict[Any, Any]:
    if len(value) > _FEW:
        return {}
    if isinstance(value, dict):
        return dict(dict.items(value))  # without a __getitem__ of its own
    return dict(enumerate(sorted(value, key=repr) if isinstance(value, set | frozenset) else value))


def _slots(kind: type) -> tuple[str, ...]:
    named = () if _foreign(kind) else vars(kind).get("__slots__", ())
    return (named,) if isinstance(named, str) else tuple(name for name in named if not name.startswith("__"))


def _of_function(function: types.FunctionType) -> Iterator[_Holder]:
    """Yield the globals that its code names, also those of other files, its closure, its defaults and attributes."""
    names = list(_names_in(function.__code__))
    tables = deque[tuple[str, dict[str, Any], str]]([("", function.__globals__, "{key}")])
    seen = set[int]()
    while tables:
        path, table, label = tables.popleft()
        if id(table) in seen:
            continue
        seen.add(id(table))
        fields = {key: table[key] for key in names if key in table}
        files = {key: field for key, field in fields.items() if isinstance(field, types.ModuleType)}
        tables.extend((file.__name__, vars(file), "{name}.{key}") for file in files.values() if not _foreign(file))
        yield _Holder(path, table, {key: field for key, field in fields.items() if key not in files}, label)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is assigned to it yet
            yield _Holder(variable, cell, {"cell_contents": cell.cell_contents}, "{name}")
    optional = function.__code__.co_varnames[: function.__code__.co_argcount][-len(function.__defaults__ or ()) :]
    defaults = dict(zip(optional, function.__defaults__ or (), strict=False)) | (function.__kwdefaults__ or {})
    yield _Holder("", (), defaults, "{key}")
    yield _Holder(function.__name__, function.__dict__, dict(function.__dict__), size=len(function.__dict__))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _foreign(value: Any) -> bool:
    """Return whether a class, a function or a module is torch's, NumPy's or the standard library's."""
    where = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(where).partition(".")[0] in _FOREIGN


def _name(holder: _Holder, key: object) -> str:
    shown = key if isinstance(key, _PRINTED) else type(key).__name__
    return holder.label.format(name=holder.name, key=shown).lstrip(".")


def _leaf(value: object, weightless: Callable[[Tensor], Tensor]) -> Leaf:
    if isinstance(value, Tensor):
        versions = (0 if tensor.is_inference() else tensor._version for tensor in (value, weightless(value)))
        return Leaf("a tensor", value, tuple(versions))
    if isinstance(value, _PRINTED):
        return Leaf(repr(value))
    if isinstance(value, np.ndarray) and value.size <= _FEW:
        return Leaf(repr(value.tolist()))
    if isinstance(value, random.Random):
        return Leaf(repr(value.getstate()))
    if isinstance(value, np.random.Generator):
        return Leaf(repr(value.bit_generator.state))
    return Leaf(type(value).__name__)


def _restore(holder: _Holder) -> None:
    owner, fields = holder.owner, holder.fields
    if isinstance(owner, dict):
        if holder.size is None or len(fields) < holder.size:
            owner.update({key: field for key, field in fields.items() if owner.get(key, owner) is not field})
        elif not _same(_contents(owner), fields):
            owner.clear()
            owner.update(fields)
    elif isinstance(owner, list | deque | set):
        if len(fields) == holder.size and not _same(_contents(owner), fields):
            owner.clear()
            (owner.update if isinstance(owner, set) else owner.extend)(fields.values())
    elif not isinstance(owner, tuple | frozenset):
        attributes = vars(owner) if isinstance(owner, type) else None
        for key, field in fields.items():
            if (attributes.get(key) if attributes is not None else getattr(owner, key, None)) is not field:
                setattr(owner, key, field)


def _same(table: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return len(table) == len(other) and all(key in table and table[key] is value for key, value in other.items())
