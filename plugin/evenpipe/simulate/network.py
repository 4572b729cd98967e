"""Messages on wires: FIFO links on which sender and receiver meet before a transmission starts."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from evenpipe.schedule import Link, Message
from evenpipe.simulate.costs import Costs, SimulationError, Wire

__all__ = ["Flight", "Network"]


class Flight(NamedTuple):
    """A message's time on the wire, from the start of its transmission to its arrival (complete at both ends)."""

    start_ms: float
    end_ms: float


class _Line:
    """One directed link: what was sent and what was posted on it, oldest first, and when its wire is free again."""

    __slots__ = ("free_ms", "posted", "sent", "wire")

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.free_ms = 0.0
        self.sent: deque[tuple[Message, float]] = deque()
        self.posted: deque[tuple[Message, float]] = deque()


class Network:
    """All links of a pipeline; ``flights`` has every message whose send and receive have met.

    A transmission starts at max(send issued, receive posted, wire free). Because both ends of a link are in order, that
    time is final as soon as it is known, in whatever order the stages are walked: no event queue is needed.
    """

    def __init__(self, costs: Costs) -> None:
        self.flights: dict[Message, Flight] = {}
        self._costs = costs
        self._lines: dict[Link, _Line] = {}

    def send(self, message: Message, at_ms: float) -> bool:
        """The source issues the send; True when the message's flight is now known."""
        line = self._line(message.link)
        line.sent.append((message, at_ms))
        return self._meet(line)

    def post(self, message: Message, at_ms: float) -> bool:
        """The target posts the receive; True when the message's flight is now known."""
        line = self._line(message.link)
        line.posted.append((message, at_ms))
        return self._meet(line)

    def unmet(self) -> list[Message]:
        """Messages of which so far only one end was issued."""
        return [message for line in self._lines.values() for message, _ in (*line.sent, *line.posted)]

    def _line(self, link: Link) -> _Line:
        line = self._lines.get(link)
        if line is None:
            line = self._lines[link] = _Line(self._costs.wire(link))
        return line

    def _meet(self, line: _Line) -> bool:
        # The newer end has just got its first entry, so that at most one pair can meet.
        if not (line.sent and line.posted):
            return False
        message, sent_ms = line.sent.popleft()
        expected, posted_ms = line.posted.popleft()
        if message != expected:
            raise SimulationError(
                f"link {message.link}: unit {message.micro_batch}.{message.chunk} is sent "
                f"where {expected.micro_batch}.{expected.chunk} is expected"
            )
        start_ms = max(sent_ms, posted_ms, line.free_ms)
        line.free_ms = start_ms + line.wire.transmit_ms
        self.flights[message] = Flight(start_ms, line.free_ms + line.wire.latency_ms)
        return True
