"""Symbols of other packages by name: find them, read their signature, tell where their code comes from."""

import dis
import inspect
import sys
from importlib import import_module
from typing import Any, Final, NamedTuple

__all__ = [
    "BUILTIN",
    "MARK",
    "PRESENT",
    "Slot",
    "UpstreamError",
    "code_module",
    "is_bound",
    "locate",
    "module_of",
    "original_of",
    "signature_of",
]

BUILTIN = "builtin"
"""Stands for the signature of a function written in C, which has none that Python can read."""

PRESENT = "present"
"""Stands for the signature of what only has to be there: a class, a value, an attribute that instances get."""

MARK = "__evenpipe_patch__"
"""Attribute that every replacement carries; its value is a `patches.Mark`."""

# What these modules wrap around a function is no code of somebody else's.
_DECORATORS: Final = frozenset(("contextlib", "torch._compile", "torch._dynamo.eval_frame"))


class UpstreamError(RuntimeError):
    """An upstream package differs from what was recorded; one line: symbol, found, expected, what to do."""


class Slot(NamedTuple):
    """Where a symbol is bound: attribute `name` of `owner`, a module or a class."""

    owner: Any
    name: str

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.name)


def module_of(symbol: str) -> str:
    """Return the module part of "module.path:attribute.path". Raises ValueError for any other form."""
    module, colon, path = symbol.partition(":")
    if not (module and colon and path):
        raise ValueError(f"{symbol!r} is not of the form module.path:attribute.path")
    return module


def locate(symbol: str) -> Slot:
    """Import the module of `symbol` and find where it is bound. Raises UpstreamError when any part is missing."""
    module = module_of(symbol)
    try:
        owner: Any = import_module(module)
    except ImportError as error:
        raise UpstreamError(f"{symbol}: cannot import {module} ({error}): install a supported release") from error
    *parents, name = symbol.partition(":")[2].split(".")
    for part in parents:
        owner = _attribute(symbol, owner, part)
    _attribute(symbol, owner, name)
    return Slot(owner, name)


def is_bound(symbol: str) -> bool:
    """Return whether a module that is loaded binds `symbol`, or a method of the class in it sets that on anything."""
    owner: Any = sys.modules.get(module_of(symbol))
    *parents, name = symbol.partition(":")[2].split(".")
    for part in parents:
        owner = getattr(owner, part, None)
    if owner is None or hasattr(owner, name):
        return owner is not None
    methods = [held for base in getattr(owner, "__mro__", ()) for held in vars(base).values()]
    codes = [code for method in methods if (code := getattr(inspect.unwrap(method), "__code__", None)) is not None]
    done = (one for code in codes if name in code.co_names for one in dis.get_instructions(code))
    return any(one.opname == "STORE_ATTR" and one.argval == name for one in done)


def signature_of(symbol: Any) -> str:
    """Names, kinds and defaults of the parameters; annotations are left out, as their text varies with Python."""
    if inspect.isbuiltin(symbol) or inspect.ismethoddescriptor(symbol):
        return BUILTIN
    try:
        signature = inspect.signature(symbol)
    except (TypeError, ValueError):
        return BUILTIN
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def code_module(symbol: Any) -> str | None:
    """Return the module whose code runs when `symbol` is called; None where Python cannot tell (functions in C).

    `__module__` would not do: `functools.wraps` copies it onto a foreign wrapper. A function that
    `contextlib.contextmanager` made belongs to the generator inside it, and one that torch's compiler is to leave alone
    to the function inside.
    """
    if isinstance(symbol, type):
        return symbol.__module__
    namespace = getattr(symbol, "__globals__", None)
    if namespace is None:
        return None
    if namespace["__name__"] in _DECORATORS and hasattr(symbol, "__wrapped__"):
        return code_module(symbol.__wrapped__)
    return str(namespace["__name__"])


def original_of(symbol: Any) -> Any:
    """Return what upstream itself bound, seen through a replacement of ours."""
    mark = getattr(symbol, MARK, None)
    return symbol if mark is None else mark.original


def _attribute(symbol: str, owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise UpstreamError(f"{symbol}: not found ({error}): install a supported release") from error
