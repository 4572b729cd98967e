"""What one stage holds over time: live units of saved activations, counted and weighed."""

from __future__ import annotations

from collections.abc import Sequence

from evenpipe.simulate.result import MemoryPoint

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """Counts live units; ``unit_bytes[s][c]`` is what a unit of chunk c weighs that belongs to stage s."""

    def __init__(self, unit_bytes: Sequence[Sequence[int]] | None) -> None:
        self.peak_live = 0
        self.peak_bytes = 0
        self.curve: list[MemoryPoint] = []
        self._live = 0
        self._bytes = 0
        self._unit_bytes = unit_bytes

    def add(self, owner: int, chunk: int, at_ms: float) -> None:
        """A unit of stage ``owner`` becomes live."""
        self._live += 1
        if self._live > self.peak_live:
            self.peak_live = self._live
        if self._unit_bytes is not None:
            self._bytes += self._unit_bytes[owner][chunk]
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        self.curve.append(MemoryPoint(at_ms, self._live, self._bytes))

    def remove(self, owner: int, chunk: int, at_ms: float) -> None:
        """A unit of stage ``owner`` is gone."""
        self._live -= 1
        if self._unit_bytes is not None:
            self._bytes -= self._unit_bytes[owner][chunk]
        self.curve.append(MemoryPoint(at_ms, self._live, self._bytes))
