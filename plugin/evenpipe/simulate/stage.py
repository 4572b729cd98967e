"""One stage's clock: walk its steps in order, computing, starting transfers, and waiting where it must."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from evenpipe.schedule import KINDS, RECEIVING, SENDING, Action, Message, Program
from evenpipe.simulate.costs import Costs
from evenpipe.simulate.memory import MemoryMeter
from evenpipe.simulate.network import Network
from evenpipe.simulate.result import Span

__all__ = ["StageClock"]

_HELD = {letter: row.held for letter, row in KINDS.items()}
_GUEST = frozenset(letter for letter, row in KINDS.items() if row.guest)
#: Links whose message leaves the sender with one unit less, and whether that is a unit of its own.
_LEAVING = {row.link: not row.guest for row in KINDS.values() if row.link is not None and row.held < 0}
#: What a stage waits for under synchronous transfers: the evictor's ends.
_OF_PAIRS = frozenset(letter for letter, row in KINDS.items() if row.link is not None and row.held and not row.guest)


class StageClock:
    """Time and memory of one stage; ``action`` is the last it came to."""

    def __init__(
        self, program: Program, stage: int, costs: Costs, network: Network, unit_bytes: Sequence[Sequence[int]] | None
    ) -> None:
        chunks = program.schedule.chunks
        self.stage = stage
        self.now_ms = 0.0
        self.busy_ms = 0.0
        self.meter = MemoryMeter(unit_bytes)
        self.action: Action | None = None
        self._steps = program.steps[stage]
        self._drain = program.drain[stage]
        of_stage = costs.of(stage)
        self._takes_ms = {row.letter: of_stage[row.cost] / chunks for row in KINDS.values() if row.cost is not None}
        self._waits_at = _OF_PAIRS if costs.synchronous_transfers else frozenset()
        self._network = network
        self._times: list[tuple[float, float]] = []

    def walk(self, met: deque[Message]) -> Iterator[Message]:
        """Go to the end; yield a message to wait until it has met, and append to ``met`` what this stage made meet."""
        network, flights, times = self._network, self._network.flights, self._times
        for step in self._steps:
            posts, completes, action, transfer, sent, _ = step
            self.action = action
            for message in posts:
                if network.post(message, self.now_ms):
                    met.append(message)
            for message in completes:
                if message not in flights:
                    yield message
                self._complete(message)
            start_ms = self.now_ms
            self._act(action)
            times.append((start_ms, self.now_ms))
            if sent is not None and not sent.is_local and network.send(sent, self.now_ms):
                met.append(sent)
            if transfer is None:
                continue
            if action.kind in SENDING and network.send(transfer, start_ms):
                met.append(transfer)
            if action.kind in RECEIVING and network.post(transfer, start_ms):
                met.append(transfer)
            if action.kind in self._waits_at:
                if transfer not in flights:
                    yield transfer
                self.now_ms = max(self.now_ms, flights[transfer].end_ms)
        for message in self._drain:
            if message not in flights:
                yield message
            self._complete(message)

    def timeline(self) -> tuple[Span, ...]:
        """The span of each action, in the order of the schedule; only after the walk."""
        flights = self._network.flights
        return tuple(
            Span(step.action, *(flights[step.transfer] if step.transfer else times))
            for step, times in zip(self._steps, self._times, strict=True)
        )

    def _act(self, action: Action) -> None:
        """Spend the time of a compute action; count the unit that comes or goes with the action."""
        kind, _, chunk, evictor = action
        held = _HELD[kind]
        if held > 0:
            self.meter.add(evictor if kind in _GUEST else self.stage, chunk, self.now_ms)
        takes_ms = self._takes_ms.get(kind)
        if takes_ms is None:
            return
        self.now_ms += takes_ms
        self.busy_ms += takes_ms
        if held < 0:
            self.meter.remove(self.stage, chunk, self.now_ms)

    def _complete(self, message: Message) -> None:
        """Wait for a message that has met; a unit that departed with it is no longer live here."""
        end_ms = self._network.flights[message].end_ms
        if end_ms > self.now_ms:
            self.now_ms = end_ms
        (kind, source, target), _, chunk = message
        if source == self.stage and kind in _LEAVING:
            self.meter.remove(source if _LEAVING[kind] else target, chunk, self.now_ms)
