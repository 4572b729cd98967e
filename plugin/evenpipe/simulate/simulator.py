"""Carry a lowered schedule out on the clock: in-order stages, FIFO links, asynchronous transfers."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice

from evenpipe.schedule import KINDS, OWN_ENDS, Column, PerStage, Program, without_cycle_collector
from evenpipe.simulate.costs import Costs, SimulationError, Wire
from evenpipe.simulate.result import MemoryCurve, Simulation, Span, StageResult

__all__ = ["Network", "simulate"]

_NEVER = -1.0
_HELD = {letter: row.held for letter, row in KINDS.items()}
_TRANSFERS = frozenset(letter for letter, row in KINDS.items() if row.link is not None)
#: What a stage waits for under synchronous transfers: the evictor's ends.
_OF_PAIRS = frozenset(letter for letter in _TRANSFERS if KINDS[letter].held and not KINDS[letter].guest)
_NO_POST = -1, -1


@without_cycle_collector()
def simulate(program: Program, costs: Costs, unit_bytes: Sequence[Sequence[int]] | None = None) -> Simulation:
    """Run ``program`` on the clock; time and memory are linear in the number of actions.

    A stage issues a step's receives when its previous action has ended, waits until the messages that the step needs
    are complete, then acts: a forward or backward takes the stage's time, a transfer only starts, an update is free.
    ``unit_bytes[s][c]`` are the bytes saved for one micro-batch by chunk c of stage s (an accepted unit weighs what it
    weighs at its evictor); without it the memory curve counts units only.

    Raises SimulationError when the costs do not fit the program, or the two ends of a link disagree. A program whose
    stages wait for one another has no order, so asking for that raises ScheduleError (:func:`evenpipe.schedule.lower`).
    """
    stages, chunks = program.schedule.stages, program.schedule.chunks
    if len(costs.forward_ms) != stages:
        raise SimulationError(f"the costs have times for {len(costs.forward_ms)} stages, the schedule has {stages}")
    if unit_bytes is not None and [len(sizes) for sizes in unit_bytes] != [chunks] * stages:
        raise SimulationError(f"unit_bytes: give {chunks} sizes (one a chunk) for each of {stages} stages")
    wiring = program.wiring
    if wiring.disagreement is not None:
        raise SimulationError(f"the ends of link {wiring.disagreement.link} disagree: verify the schedule first")
    network = Network([costs.wire(link) for link in wiring.links], wiring.link_of)
    clocks = [_StageClock(program, stage, costs, network, unit_bytes) for stage in range(stages)]
    # Every stage walks as far as it can, and on again when what it waits for has met. No event queue: the times of a
    # message are final once known, so the order of the walk does not matter.
    walks = [clock.walk() for clock in clocks]
    network.woken.extend(range(stages))
    while network.woken:
        stage = network.woken.popleft()
        wanted = next(walks[stage], None)
        if wanted is not None:
            network.waiting.setdefault(wanted, []).append(stage)
    assert not network.waiting, "a program with an order ends"
    makespan_ms = max((clock.now_ms for clock in clocks), default=0.0)
    if not math.isfinite(makespan_ms):
        raise SimulationError("the times add up to more than a number can hold: give shorter ones")
    results = tuple(
        StageResult(
            busy_ms=clock.busy_ms,
            idle_ms=max(0.0, makespan_ms - clock.busy_ms),  # sums of the same times may round differently
            peak_live=int(clock.memory.live.max(initial=0)),
            peak_bytes=max(clock.memory.bytes or (), default=0),
            memory=clock.memory,
        )
        for clock in clocks
    )
    bubble_fraction = sum(result.idle_ms for result in results) / (makespan_ms * stages) if makespan_ms else 0.0
    return Simulation(makespan_ms, bubble_fraction, results, PerStage(stages, lambda stage: clocks[stage].spans()))


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


class _StageClock:
    """Time and memory of one stage, which computes, starts transfers, and waits where it must."""

    def __init__(
        self, program: Program, stage: int, costs: Costs, network: Network, unit_bytes: Sequence[Sequence[int]] | None
    ) -> None:
        wiring = program.wiring
        self.stage = stage
        self.now_ms = 0.0
        self.busy_ms = 0.0
        self.memory = MemoryCurve(unit_bytes)
        self._wiring = wiring
        self._order = program.order
        self._rows = wiring.schedule.table.of(stage)
        self._actions = wiring.schedule.actions[stage]
        of_stage, chunks = costs.of(stage), wiring.schedule.chunks
        self._takes_ms = {row.letter: of_stage[row.cost] / chunks for row in KINDS.values() if row.cost is not None}
        self._waits_at = _OF_PAIRS if costs.synchronous_transfers else frozenset()
        self._network = network
        self._start_ms = array("d")

    def walk(self) -> Iterator[int]:
        """Go to the end; yield a message to wait until it has met."""
        wiring, rows, stage, waits_at = self._wiring, self._rows, self.stage, self._waits_at
        issue, end_ms, change = self._network.issue, self._network.end_ms, self.memory.change
        started, takes_ms = self._start_ms.append, self._takes_ms
        posts = zip(*map(_numbers, self._order.posts(stage)), strict=True)
        leaving = zip(*map(_numbers, wiring.leaving(stage)), strict=True)
        posted, received = next(posts, _NO_POST)
        now_ms = 0.0
        columns = map(_numbers, (*wiring.waits(stage), wiring.moves[rows]))
        for number, action, departing, loaded, taken, settled, moved in zip(count(rows.start), self._actions, *columns):
            while posted == number:
                issue(received, now_ms)
                posted, received = next(posts, _NO_POST)
            free_ms = now_ms
            for message, owner, chunk in islice(leaving, departing):
                if end_ms[message] < 0:
                    yield message
                free_ms = max(free_ms, end_ms[message])
                change(-1, owner, chunk, free_ms)
            kind, _, chunk, evictor = action
            if kind not in _TRANSFERS:  # a transfer waits by itself
                now_ms = free_ms
            for message in (loaded, taken, settled):
                if message >= 0:
                    if end_ms[message] < 0:
                        yield message
                    if (complete_ms := end_ms[message]) > now_ms:
                        now_ms = complete_ms
            free_ms = max(now_ms, free_ms)
            started(free_ms)
            held = _HELD[kind]
            if held > 0:
                change(1, stage if evictor < 0 else evictor, chunk, free_ms)
            if kind in takes_ms:
                now_ms += takes_ms[kind]
                self.busy_ms += takes_ms[kind]
                if held < 0:
                    change(-1, stage, chunk, now_ms)
            if moved >= 0:
                issue(moved, now_ms if kind in takes_ms else free_ms)
                if kind in OWN_ENDS:
                    issue(moved, free_ms)
                if kind in waits_at:
                    if end_ms[moved] < 0:
                        yield moved
                    now_ms = max(now_ms, end_ms[moved])
        for message, owner, chunk in leaving:
            if end_ms[message] < 0:
                yield message
            now_ms = max(now_ms, end_ms[message])
            change(-1, owner, chunk, now_ms)
        for message in wiring.left_over(stage).tolist():
            if end_ms[message] < 0:
                yield message
            now_ms = max(now_ms, end_ms[message])
        self.now_ms = now_ms

    def spans(self) -> tuple[Span, ...]:
        """When each action was, in the order of the schedule; only after the walk."""
        sent = self._network.start_ms, self._network.end_ms
        moves = _numbers(self._wiring.moves[self._rows])
        return tuple(
            Span(action, sent[0][moved], sent[1][moved])
            if action.kind in _TRANSFERS
            else Span(action, start_ms, start_ms + self._takes_ms.get(action.kind, 0.0))
            for action, start_ms, moved in zip(self._actions, self._start_ms, moves, strict=True)
        )


def _numbers(column: Column) -> array[int]:
    """A column of which Python reads one number after the other quickly."""
    numbers = array("i")
    numbers.frombytes(column.astype("i").tobytes())
    return numbers
