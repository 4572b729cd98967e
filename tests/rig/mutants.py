"""Changes the code of a module while it is in use, and back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["mutated"]


@contextmanager
def mutated(module: ModuleType, old: str, new: str) -> Iterator[None]:
    """Inside, functions and methods of `module` run as if its source had `new` where it has `old`, once."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} of {old!r}"
    codes = dict(_codes(compile(source.replace(old, new), str(module.__file__), "exec"), ""))
    live = {name: one for name, one in _functions(vars(module), module.__name__) if name in codes}
    before = {name: function.__code__ for name, function in live.items()}
    for name, function in live.items():
        # What is left out may be all that there was of `super()`, whose cell the function has.
        function.__code__ = codes[name].replace(co_freevars=before[name].co_freevars)
    try:
        yield
    finally:
        for name, function in live.items():
            function.__code__ = before[name]


def _codes(code: CodeType, prefix: str) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield prefix + constant.co_name, constant
            yield from _codes(constant, f"{prefix}{constant.co_name}.")


def _functions(names: Any, module: str) -> Iterator[tuple[str, FunctionType]]:
    for value in list(names.values()):
        if isinstance(value, property):
            value = value.fget
        value = inspect.unwrap(getattr(value, "__func__", value))
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, FunctionType) and "<" not in value.__qualname__:
            yield value.__qualname__, value
        elif isinstance(value, type):
            yield from _functions(vars(value), module)
