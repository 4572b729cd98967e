"""When a run looks again at what it has decided."""

from __future__ import annotations

import math
import time
from typing import Final

__all__ = ["Pace"]

#: Without an interval in iterations (Ada-Grouper's experiments tune once an hour, §6.2.4).
_INTERVAL_S: Final = 3600.0
#: The first time, since nobody knows yet how long an iteration takes, and devices and network have just been woken up.
_FIRST_INTERVAL: Final = 10


class Pace:
    """Decisions come every `interval` iterations; None: every so many as take an hour."""

    def __init__(self, interval: int | None) -> None:
        self._interval = interval
        self._since: tuple[int, float | None] = (0, None)

    def begin(self, iteration: int) -> None:
        """A decision is made before `iteration`."""
        self._since = (iteration, time.monotonic())

    def next_after(self, iteration: int) -> int:
        """Return before which iteration the next decision comes, if one is made before `iteration`.

        Told in iterations, an hour needs no clock that all ranks agree on, and nobody to be asked in between.
        """
        if self._interval is not None:
            return iteration + self._interval
        before, at = self._since
        if at is None or iteration == before:
            return iteration + _FIRST_INTERVAL
        return iteration + max(1, math.ceil(_INTERVAL_S * (iteration - before) / (time.monotonic() - at)))

    def no_later(self, planned: int, iteration: int) -> int:
        """Return `planned` for a run that goes on from `iteration`, or less, where its own interval asks for that."""
        return planned if self._interval is None else min(planned, iteration + self._interval)
