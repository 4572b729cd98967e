"""Messages on wires: FIFO links on which sender and receiver meet before a transmission starts."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from evenpipe.simulate.costs import Wire

__all__ = ["Network"]

_NEVER = -1.0


class Network:
    """All links of a pipeline, and all messages that they carry: ``link_of`` has the link of each, as a number.

    Of a message whose send and receive have met, ``start_ms`` and ``end_ms`` have the start of its transmission and its
    arrival (complete at both ends). A transmission starts at max(send issued, receive posted, wire free). Because both
    ends of a link are in order, that time is final as soon as it is known, in whatever order the stages are walked: no
    event queue is needed. ``waiting``: by message, the stages that wait for it to meet; then they are in ``woken``.
    """

    def __init__(self, wires: Sequence[Wire], link_of: Iterable[int]) -> None:
        self.waiting: dict[int, list[int]] = {}
        self.woken: deque[int] = deque()
        self._wires = wires
        self._link_of = array("i", link_of)
        self._free_ms = [0.0] * len(wires)
        self.start_ms = array("d", [_NEVER]) * len(self._link_of)
        self.end_ms = array("d", [_NEVER]) * len(self._link_of)

    def issue(self, message: int, at_ms: float) -> None:
        """The source issues the send, or the target posts the receive."""
        other_ms = self.start_ms[message]
        if other_ms == _NEVER:
            self.start_ms[message] = at_ms
            return
        link = self._link_of[message]
        wire = self._wires[link]
        start_ms = at_ms if at_ms > other_ms else other_ms
        if (free_ms := self._free_ms[link]) > start_ms:
            start_ms = free_ms
        self.start_ms[message] = start_ms
        self._free_ms[link] = free_ms = start_ms + wire.transmit_ms
        end_ms = free_ms + wire.latency_ms
        self.end_ms[message] = max(start_ms, end_ms - wire.beside_ms) if wire.beside_ms else end_ms
        if message in self.waiting:
            self.woken.extend(self.waiting.pop(message))
