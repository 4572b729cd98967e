"""A moving average."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import fmean
from typing import Final

__all__ = ["WINDOW", "Window"]

#: Samples that are averaged. A measurement brings as many, so that a network that has changed is believed at once, but
#: for one that would take too long and brings fewer.
WINDOW: Final = 5


class Window:
    """The last `WINDOW` samples (Ada-Grouper §4.3)."""

    def __init__(self, samples: Iterable[float] = ()) -> None:
        self._samples = deque(samples, maxlen=WINDOW)

    def add(self, samples: Iterable[float]) -> None:
        """Newer samples, oldest first."""
        self._samples.extend(samples)

    @property
    def samples(self) -> list[float]:
        """Oldest first."""
        return list(self._samples)

    @property
    def mean(self) -> float:
        """Their average; there must be some."""
        return fmean(self._samples)
