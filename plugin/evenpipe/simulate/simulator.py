"""Carry a lowered schedule out on the clock: in-order stages, FIFO links, asynchronous transfers.

A time is a number of milliseconds, or an array of them, one for each of many costs: the order in which stages are
walked does not depend on times.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count, islice
from operator import add
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from evenpipe.schedule import (
    BACKWARD,
    INPUT_GRADIENT,
    KINDS,
    OWN_ENDS,
    WEIGHT_GRADIENT,
    Column,
    Cost,
    Kind,
    Lazy,
    Program,
    awaited_swaps,
    without_cycle_collector,
)
from evenpipe.simulate.costs import Costs, SimulationError, Wire, costs_of_chunks
from evenpipe.simulate.result import MemoryCurve, Simulation, Span, StageResult, UnitChange

__all__ = ["ManyCosts", "Network", "simulate"]

#: A number, or an array of numbers.
Time = Any
Times = NDArray[np.float64]

_COMES, _GOES = UnitChange.COMES, UnitChange.GOES
_COMING = frozenset(letter for letter, row in KINDS.items() if row.held > 0)
_AT_END = {BACKWARD: _GOES, INPUT_GRADIENT: UnitChange.HALVES, WEIGHT_GRADIENT: UnitChange.ENDS}
_TRANSFERS = frozenset(letter for letter, row in KINDS.items() if row.link is not None)
#: What a stage waits for under synchronous transfers: the evictor's ends.
_OF_PAIRS = frozenset(letter for letter in _TRANSFERS if KINDS[letter].held and not KINDS[letter].guest)
_NO_POST = -1, -1
#: Rows of many costs that are simulated at a time, so that the times of all messages find room.
_ROWS: Final = 4096


@without_cycle_collector()
def simulate(
    program: Program,
    costs: Costs,
    unit_bytes: Sequence[Sequence[int]] | None = None,
    left_bytes: Sequence[Sequence[int]] | None = None,
) -> Simulation:
    """Run ``program`` on the clock; time and memory are linear in the number of actions.

    A stage issues a step's receives when its previous action has ended, waits until the messages that the step needs
    are complete, then acts: a forward or backward takes the stage's time, a transfer only starts, an update is free.
    ``unit_bytes[s][c]`` are the bytes saved for one micro-batch by chunk c of stage s (an accepted unit weighs what it
    weighs at its evictor); without it the memory curve counts units only. ``left_bytes[s][c]`` are the bytes that its
    input gradient leaves for its weight gradient, where a backward is split; all that was saved, if not given.

    Raises SimulationError when the costs do not fit the program, or the two ends of a link disagree. A program whose
    stages wait for one another has no order, so asking for that raises ScheduleError (:func:`evenpipe.schedule.lower`).
    """
    stages, chunks = program.schedule.stages, program.schedule.chunks
    if len(costs.forward_ms) != stages:
        raise SimulationError(f"the costs have times for {len(costs.forward_ms)} stages, the schedule has {stages}")
    for name, given in (("unit_bytes", unit_bytes), ("left_bytes", left_bytes)):
        if given is not None and [len(sizes) for sizes in given] != [chunks] * stages:
            raise SimulationError(f"{name}: give {chunks} sizes (one a chunk) for each of {stages} stages")
    wiring = program.wiring
    if wiring.disagreement is not None:
        raise SimulationError(f"the ends of link {wiring.disagreement.link} disagree: verify the schedule first")
    network = Network([costs.wire(link) for link in wiring.links], wiring.link_of)
    synchronous = _OF_PAIRS if costs.synchronous_transfers else frozenset()
    clocks = [
        _StageClock(
            program,
            stage,
            costs.of(stage, chunks),
            network,
            MemoryCurve(unit_bytes, left_bytes),
            synchronous,
            costs.awaited_swaps,
        )
        for stage in range(stages)
    ]
    makespan_ms = _makespan(clocks, network)
    if not math.isfinite(makespan_ms):
        raise SimulationError("the times add up to more than a number can hold: give shorter ones")
    results = tuple(clock.result(makespan_ms) for clock in clocks)
    bubble_fraction = sum(result.idle_ms for result in results) / (makespan_ms * stages) if makespan_ms else 0.0
    return Simulation(
        makespan_ms,
        bubble_fraction,
        results,
        Lazy(stages, lambda stage: clocks[stage].spans()),
        [clock.starts_ms for clock in clocks],
        network.end_ms,
    )


@dataclass(frozen=True)
class ManyCosts:
    """A verified program under many costs at once: rows of costs take little longer than one simulation."""

    program: Program

    def makespans(self, forward_ms: Times, backward_ms: Times, transmit_ms: Times, latency_ms: Times) -> Times:
        """Return the milliseconds of the program for each row of costs, equal to those of :func:`simulate`.

        forward_ms, backward_ms: rows × stages, as in `Costs`. transmit_ms, latency_ms: rows × links, of the wires of
        `program.wiring.links` in their order.
        """
        costs = forward_ms, backward_ms, transmit_ms, latency_ms
        parts = range(0, len(forward_ms), _ROWS)
        return np.concatenate([self._of_rows(*(ms[at : at + _ROWS].T.copy() for ms in costs)) for at in parts])

    def _of_rows(self, forward_ms: Times, backward_ms: Times, transmit_ms: Times, latency_ms: Times) -> Times:
        wires = [Wire(latency, transmit) for latency, transmit in zip(latency_ms, transmit_ms, strict=True)]
        network = Network(wires, self.program.wiring.link_of, np.maximum, lambda messages: [0.0] * messages)
        chunks = self.program.schedule.chunks
        clocks = [
            _StageClock(self.program, stage, costs_of_chunks(forward, backward, backward / 2, chunks), network)
            for stage, (forward, backward) in enumerate(zip(forward_ms, backward_ms, strict=True))
        ]
        makespans: Times = np.broadcast_to(_makespan(clocks, network), forward_ms.shape[1])
        return makespans


def _makespan(clocks: Sequence[_StageClock], network: Network) -> Time:
    """When all stages have ended. Every stage walks as far as it can, and on again when what it waits for has met."""
    walks = [clock.walk() for clock in clocks]
    woken = network.woken
    woken.extend(range(len(clocks)))
    while woken:
        stage = woken.popleft()
        message = next(walks[stage], None)
        if message is not None:
            network.waiting.setdefault(message, []).append(stage)
    assert not network.waiting, "a program with an order ends"
    return reduce(network.later, (clock.now_ms for clock in clocks))


def _doubles(messages: int) -> MutableSequence[float]:
    return array("d", bytes(8 * messages))


class Network:
    """All links of a pipeline, and all messages that they carry: ``link_of`` has the link of each, as a number.

    Of a message with ``met`` 2, whose send and receive have met, ``start_ms`` and ``end_ms`` have the start of its
    transmission and its arrival (complete at both ends). A transmission starts at max(send issued, receive posted, wire
    free). Because both ends of a link are in order, that time is final as soon as it is known, in whatever order the
    stages are walked: no event queue is needed. ``waiting``: by message, the stages that wait for it to meet; then they
    are in ``woken``. ``later``: the maximum of two times. ``times``: makes room for so many of them.
    """

    def __init__(
        self,
        wires: Sequence[Wire],
        link_of: Iterable[int],
        later: Callable[[Time, Time], Time] = max,
        times: Callable[[int], MutableSequence[Time]] = _doubles,
    ) -> None:
        self.waiting: dict[int, list[int]] = {}
        self.woken: deque[int] = deque()
        self.later = later
        self._wires = wires
        self._link_of = array("i", link_of)
        self._free_ms: list[Time] = [0.0] * len(wires)
        self.met = bytearray(len(self._link_of))
        self.start_ms, self.end_ms = times(len(self.met)), times(len(self.met))

    def issue(self, message: int, at_ms: Time) -> None:
        """The source issues the send, or the target posts the receive."""
        self.met[message] += 1
        if self.met[message] == 1:
            self.start_ms[message] = at_ms
            return
        link, later = self._link_of[message], self.later
        wire = self._wires[link]
        start_ms = later(self._free_ms[link], later(at_ms, self.start_ms[message]))
        self.start_ms[message] = start_ms
        self._free_ms[link] = free_ms = start_ms + wire.transmit_ms
        end_ms = free_ms + wire.latency_ms
        self.end_ms[message] = max(start_ms, end_ms - wire.beside_ms) if wire.beside_ms else end_ms
        if message in self.waiting:
            self.woken.extend(self.waiting.pop(message))


class _StageClock:
    """The time of one stage, which computes, starts transfers, and waits where it must; and its ``memory``, if asked.

    ``takes_ms``: per model chunk, what each kind of compute takes. ``synchronous``: transfers that the stage waits for
    before it goes on. ``awaits_swaps``: as in `Costs`.
    """

    def __init__(
        self,
        program: Program,
        stage: int,
        takes_ms: Sequence[Mapping[Cost, Time]],
        network: Network,
        memory: MemoryCurve | None = None,
        synchronous: Collection[Kind] = (),
        awaits_swaps: bool = False,
    ) -> None:
        wiring = program.wiring
        self.stage = stage
        self.now_ms: Time = 0.0
        self.memory = MemoryCurve(None) if memory is None else memory
        self._change = _nothing if memory is None else memory.change
        self._wiring = wiring
        self._order = program.order
        self._rows = rows = wiring.schedule.table.of(stage)
        awaited = awaited_swaps(wiring.schedule.actions[stage]) if awaits_swaps else {}
        self._awaited = {rows.start + at: [rows.start + out for out in outs] for at, outs in awaited.items()}
        self._actions = wiring.schedule.actions[stage]
        costs = {row.letter: row.cost for row in KINDS.values() if row.cost is not None}
        self._takes_ms = {letter: [of_chunk[cost] for of_chunk in takes_ms] for letter, cost in costs.items()}
        self._synchronous = synchronous
        self._network = network
        self.starts_ms: MutableSequence[Time] = [] if memory is None else array("d")

    def walk(self) -> Iterator[int]:
        """Go to the end; yield a message to wait until it has met."""
        wiring, rows, stage, network = self._wiring, self._rows, self.stage, self._network
        issue, met, end_ms, later, change = network.issue, network.met, network.end_ms, network.later, self._change
        started, takes_ms, awaited = self.starts_ms.append, self._takes_ms, self._awaited
        posts = zip(*map(_numbers, self._order.posts(stage)), strict=True)
        leaving = zip(*map(_numbers, wiring.leaving(stage)), strict=True)
        posted, received = next(posts, _NO_POST)
        now_ms: Time = 0.0
        columns = map(_numbers, (*wiring.waits(stage), wiring.moves[rows]))
        for number, action, departing, loaded, taken, settled, moved in zip(count(rows.start), self._actions, *columns):
            while posted == number:
                issue(received, now_ms)
                posted, received = next(posts, _NO_POST)
            free_ms = now_ms
            for message, owner, chunk in islice(leaving, departing):
                if met[message] < 2:
                    yield message
                free_ms = later(free_ms, end_ms[message])
                change(_GOES, owner, chunk, free_ms)
            kind, _, chunk, evictor = action
            for message in awaited.get(number, ()):  # its both ends were issued by this stage
                now_ms, free_ms = later(now_ms, end_ms[message]), later(free_ms, end_ms[message])
            if kind not in _TRANSFERS:  # a transfer waits by itself
                now_ms = free_ms
            for message in (loaded, taken, settled):
                if message >= 0:
                    if met[message] < 2:
                        yield message
                    now_ms = later(now_ms, end_ms[message])
            free_ms = later(now_ms, free_ms) if departing else now_ms
            started(free_ms)
            if kind in _COMING:
                change(_COMES, stage if evictor < 0 else evictor, chunk, free_ms)
            if kind in takes_ms:
                now_ms = now_ms + takes_ms[kind][chunk]
                if kind in _AT_END:
                    change(_AT_END[kind], stage, chunk, now_ms)
            if moved >= 0:
                issue(moved, now_ms if kind in takes_ms else free_ms)
                if kind in OWN_ENDS:
                    issue(moved, free_ms)
                if kind in self._synchronous:
                    if met[moved] < 2:
                        yield moved
                    now_ms = later(now_ms, end_ms[moved])
        for message, owner, chunk in leaving:
            if met[message] < 2:
                yield message
            now_ms = later(now_ms, end_ms[message])
            change(_GOES, owner, chunk, now_ms)
        for message in wiring.left_over(stage).tolist():
            if met[message] < 2:
                yield message
            now_ms = later(now_ms, end_ms[message])
        self.now_ms = now_ms

    def result(self, makespan_ms: float) -> StageResult:
        """Return what the stage did and held; only after the walk."""
        # Added up in order, not by `sum`, whose rounding depends on Python's version.
        takes_ms = self._takes_ms
        computed = (takes_ms[action.kind][action.chunk] for action in self._actions if action.kind in takes_ms)
        busy_ms = reduce(add, computed, 0.0)
        return StageResult(
            busy_ms=busy_ms,
            idle_ms=max(0.0, makespan_ms - busy_ms),  # sums of the same times may round differently
            peak_live=int(self.memory.live.max(initial=0)),
            peak_bytes=max(self.memory.bytes or (), default=0),
            memory=self.memory.points,
        )

    def spans(self) -> tuple[Span, ...]:
        """When each action was, in the order of the schedule; only after the walk."""
        sent = self._network.start_ms, self._network.end_ms
        moves = _numbers(self._wiring.moves[self._rows])
        takes_ms = self._takes_ms
        return tuple(
            Span(action, sent[0][moved], sent[1][moved])
            if action.kind in _TRANSFERS
            else Span(
                action, start_ms, start_ms + (takes_ms[action.kind][action.chunk] if action.kind in takes_ms else 0)
            )
            for action, start_ms, moved in zip(self._actions, self.starts_ms, moves, strict=True)
        )


def _numbers(column: Column) -> array[int]:
    """Return a column of which Python reads one number after the other quickly."""
    numbers = array("i")
    numbers.frombytes(column.astype("i").tobytes())
    return numbers


def _nothing(change: UnitChange, owner: int, chunk: int, at_ms: Time) -> None:
    """Keep no account of memory."""
