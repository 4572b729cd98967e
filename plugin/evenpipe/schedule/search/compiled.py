"""Numba, where it is installed: loops over numbers that are as fast as a compiler makes them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final, TypeVar, cast

__all__ = ["COMPILED", "compiled"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: Whether functions are compiled. Where not, they are right, and some 200 times slower.
COMPILED: Final = find_spec("numba") is not None


def compiled(function: _F) -> _F:
    """Return ``function``, compiled when it is first called, and kept on disk; as it is without numba."""
    if not COMPILED:
        return function
    from numba import njit

    return cast(_F, njit(cache=True)(function))
