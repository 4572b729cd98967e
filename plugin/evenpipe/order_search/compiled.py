"""Numba, where it can be had: loops over numbers that are as fast as a compiler makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

try:
    import numba
except ImportError:  # there is none, or none for this numpy
    numba = None

__all__ = ["COMPILED", "compiled"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: Whether functions are compiled. Where not, they are right, and some 200 times slower.
COMPILED: Final = numba is not None and not numba.config.DISABLE_JIT


def compiled(function: _F) -> _F:
    """Return ``function``, compiled when it is first called, and kept on disk; as it is without numba."""
    if not COMPILED:
        return function
    try:
        made = numba.njit(cache=True)(function)
    except RuntimeError:  # there is no folder to keep it in
        made = numba.njit(function)
    return cast(_F, made)
