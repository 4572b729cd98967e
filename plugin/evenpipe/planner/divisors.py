"""The sizes that divide a whole."""

from __future__ import annotations

from math import isqrt

__all__ = ["divisors"]


def divisors(whole: int) -> list[int]:
    """Return all divisors of `whole`, which is at least 1, in ascending order."""
    small = [size for size in range(1, isqrt(whole) + 1) if whole % size == 0]
    return sorted({*small, *(whole // size for size in small)})
