"""What an iteration of a run takes, in one number, the same wherever it is told."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

__all__ = ["median_ms"]


def median_ms(iteration_ms: Sequence[float]) -> float:
    """Of all iterations but the first, where there are others: it also starts up what the others find running."""
    return median(iteration_ms[1:] or iteration_ms)
