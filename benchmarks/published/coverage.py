"""The interval that the planner prints for runs unlike those it was fitted on: made by leaving a source out.

Each source of published iterations is judged by an interval that is made of the others.
"""

from __future__ import annotations

from math import ceil
from typing import Final, NamedTuple

from evenpipe.planner.uncertainty import WITHIN

from .megatron import golden_runs
from .production import longer
from .vtrain import iterations

__all__ = ["LeftOut", "without_each"]

_SHARE: Final = 0.95


class LeftOut(NamedTuple):
    """The interval that is made without a source, and how many of the source's iterations are within it."""

    low: float
    high: float
    inside: int
    of: int


def without_each() -> dict[str, LeftOut]:
    """Return, by source, what the other sources say of it. The constants were fitted to none of these iterations.

    An interval contains the shortest one that has 19 in 20 iterations of each other source. It also contains
    ``WITHIN``, which is measured on the fitted sources, each left out of the fit.
    """
    sources = {
        "vTrain": [1 / (1 + one.error) - 1 for one in iterations()],
        "Megatron's tests": [one.longer for one in golden_runs()],
        "production runs": [ratio for ratio, _ in longer().values()],
    }
    shortest = {name: _shortest(own) for name, own in sources.items()}
    found = {}
    assert WITHIN.low is not None
    assert WITHIN.high is not None
    for name, own in sources.items():
        others = [interval for source, interval in shortest.items() if source != name]
        low = min(WITHIN.low, *(interval[0] for interval in others))
        high = max(WITHIN.high, *(interval[1] for interval in others))
        found[name] = LeftOut(low, high, sum(low <= one <= high for one in own), len(own))
    return found


def _shortest(values: list[float]) -> tuple[float, float]:
    """The shortest interval that has 19 in 20 of the values."""
    ordered, count = sorted(values), ceil(_SHARE * len(values))
    ends = zip(ordered, ordered[count - 1 :], strict=False)
    return min(ends, key=lambda interval: interval[1] - interval[0])
