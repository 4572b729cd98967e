"""What one stage holds over time: live units of saved activations, counted and weighed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from evenpipe.simulate.result import MemoryCurve

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """Counts live units; ``unit_bytes[s][c]`` is what a unit of chunk c weighs that belongs to stage s."""

    def __init__(self, unit_bytes: Sequence[Sequence[int]] | None) -> None:
        self.curve = MemoryCurve(array("d"), array("i"), None if unit_bytes is None else [])
        self._add_time, self._add_live = self.curve.at_ms.append, self.curve.live.append
        self._live = 0
        self._bytes = 0
        self._unit_bytes = unit_bytes

    def change(self, by: int, owner: int, chunk: int, at_ms: float) -> None:
        """A unit of stage ``owner`` becomes live (+1) or is gone (-1)."""
        self._live += by
        self._add_time(at_ms)
        self._add_live(self._live)
        if self._unit_bytes is not None and self.curve.bytes is not None:
            self._bytes += by * self._unit_bytes[owner][chunk]
            self.curve.bytes.append(self._bytes)
