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
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from evenpipe.schedule import (
    BACKWARD,
    DEFECT,
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
    by_kind,
    without_cycle_collector,
)
from evenpipe.simulate.costs import Costs, SimulationError, Wire, costs_of_chunks
from evenpipe.simulate.result import MemoryCurve, Simulation, Span, StageResult, UnitChange

__all__ = ["ManyCosts", "Network", "simulate"]

#: A number, or an array of numbers.
Time = Any
Times = NDArray[np.float64]

#: Of each kind, whether a unit comes with its start; and the change with its end, where that is not 0.
_COMES = by_kind(lambda row: row.held > 0)
_ENDS = {BACKWARD: UnitChange.GOES, INPUT_GRADIENT: UnitChange.HALVES, WEIGHT_GRADIENT: UnitChange.ENDS}
_AT_END = by_kind(lambda row: _ENDS.get(row.letter, 0))
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
            *(program, stage, costs.of(stage, chunks), network, synchronous), lambda: array("d"), costs.awaited_swaps
        )
        for stage in range(stages)
    ]
    makespan_ms = _makespan(clocks, network)
    if not math.isfinite(makespan_ms):
        raise SimulationError("the times add up to more than a number can hold: give shorter ones")
    results = tuple(clock.result(makespan_ms, unit_bytes, left_bytes) for clock in clocks)
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
    for message, (stage, *_) in network.waiting.items():
        raise SimulationError(clocks[stage].stuck_at(message))
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
        if not self.met[message]:
            self.met[message], self.start_ms[message] = 1, at_ms
            return
        link, later = self._link_of[message], self.later
        wire = self._wires[link]
        start_ms = later(self._free_ms[link], later(at_ms, self.start_ms[message]))
        self._free_ms[link] = free_ms = start_ms + wire.transmit_ms
        end_ms = free_ms + wire.latency_ms
        self.met[message], self.start_ms[message] = 2, start_ms
        self.end_ms[message] = max(start_ms, end_ms - wire.beside_ms) if wire.beside_ms else end_ms
        if message in self.waiting:
            self.woken.extend(self.waiting.pop(message))


class _StageClock:
    """The time of one stage, which computes, starts transfers, and waits where it must.

    ``takes_ms``: per model chunk, what each kind of compute takes. ``synchronous``: transfers that the stage waits for
    before it goes on. ``awaits_swaps``: as in `Costs`. ``starts_ms``: of each action; ``gone_ms``: when each unit that
    departs is known to be gone.
    """

    def __init__(
        self,
        program: Program,
        stage: int,
        takes_ms: Sequence[Mapping[Cost, Time]],
        network: Network,
        synchronous: Collection[Kind] = (),
        times: Callable[[], MutableSequence[Time]] = list,
        awaits_swaps: bool = False,
    ) -> None:
        wiring = program.wiring
        self.stage = stage
        self.now_ms: Time = 0.0
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
        self.starts_ms, self.gone_ms = times(), times()

    def walk(self) -> Iterator[int]:
        """Go to the end; yield a message to wait until it has met."""
        wiring, rows, stage, network = self._wiring, self._rows, self.stage, self._network
        issue, met, end_ms, later = network.issue, network.met, network.end_ms, network.later
        started, gone, takes_ms, awaited = self.starts_ms.append, self.gone_ms.append, self._takes_ms, self._awaited
        posts = zip(*map(_numbers, self._order.posts(stage)), strict=True)
        leaving = iter(_numbers(wiring.leaving(stage)[0]))
        posted, received = next(posts, _NO_POST)
        now_ms: Time = 0.0
        columns = map(_numbers, (*wiring.waits(stage), wiring.moves[rows]))
        for number, action, departing, loaded, taken, settled, moved in zip(count(rows.start), self._actions, *columns):
            while posted == number:
                issue(received, now_ms)
                posted, received = next(posts, _NO_POST)
            free_ms = now_ms
            if departing:
                for message in islice(leaving, departing):
                    if met[message] < 2:
                        yield message
                    free_ms = later(free_ms, end_ms[message])
                    gone(free_ms)
            for message in awaited.get(number, ()):  # its both ends were issued by this stage
                now_ms, free_ms = later(now_ms, end_ms[message]), later(free_ms, end_ms[message])
            kind, _, chunk, _ = action
            of_kind = takes_ms.get(kind)
            if of_kind is not None or kind not in _TRANSFERS:  # a transfer waits by itself
                now_ms = free_ms
            if loaded >= 0:
                if met[loaded] < 2:
                    yield loaded
                now_ms = later(now_ms, end_ms[loaded])
            if taken >= 0:
                if met[taken] < 2:
                    yield taken
                now_ms = later(now_ms, end_ms[taken])
            if settled >= 0:
                if met[settled] < 2:
                    yield settled
                now_ms = later(now_ms, end_ms[settled])
            if of_kind is not None:
                started(now_ms)
                now_ms = now_ms + of_kind[chunk]
                if moved >= 0:
                    issue(moved, now_ms)
                continue
            free_ms = later(now_ms, free_ms) if departing else now_ms
            started(free_ms)
            if moved >= 0:
                issue(moved, free_ms)
                if kind in OWN_ENDS:
                    issue(moved, free_ms)
                if kind in self._synchronous:
                    if met[moved] < 2:
                        yield moved
                    now_ms = later(now_ms, end_ms[moved])
        for message in leaving:
            if met[message] < 2:
                yield message
            now_ms = later(now_ms, end_ms[message])
            gone(now_ms)
        for message in wiring.left_over(stage).tolist():
            if met[message] < 2:
                yield message
            now_ms = later(now_ms, end_ms[message])
        self.now_ms = now_ms

    def stuck_at(self, message: int) -> str:
        """Return the line on a walk that has ended at `message`, as none does of a program whose order was proved."""
        wiring = self._wiring
        link, micro_batch = wiring.links[wiring.link_of[message]], wiring.schedule.table.micro_batch[message]
        return (
            f"schedule {wiring.schedule.name}, stage {self.stage}: waits for ever for {link} {micro_batch}, though the "
            f"schedule was proved to end: {DEFECT}: report it, with the schedule"
        )

    def result(
        self,
        makespan_ms: float,
        unit_bytes: Sequence[Sequence[int]] | None,
        left_bytes: Sequence[Sequence[int]] | None,
    ) -> StageResult:
        """Return what the stage did and held; only after the walk."""
        takes_ms = self._each_takes_ms()
        # Added up in order, not by `sum`, whose rounding depends on Python's version.
        busy_ms = float(np.cumsum(takes_ms)[-1]) if len(takes_ms) else 0.0
        memory = MemoryCurve(*self._changes(takes_ms), unit_bytes, left_bytes)
        return StageResult(
            busy_ms=busy_ms,
            idle_ms=max(0.0, makespan_ms - busy_ms),  # sums of the same times may round differently
            peak_live=int(memory.live.max(initial=0)),
            peak_bytes=0 if memory.bytes is None else int(memory.bytes.max(initial=0)),
            memory=memory.points,
        )

    def _each_takes_ms(self) -> Times:
        """Return what each action computes."""
        table = self._wiring.schedule.table
        by = np.zeros((128, len(self._takes_ms[BACKWARD])))
        for letter, of_chunks in self._takes_ms.items():
            by[ord(letter)] = of_chunks
        each: Times = by[table.kind[self._rows], table.chunk[self._rows]]
        return each

    def _changes(self, takes_ms: Times) -> tuple[Times, Column, Column, Column]:
        """Return when units change, how, whose they are, and their chunks; in order of time.

        Of changes at one time those come first that the stage waits for before an action, then the action's own.
        """
        wiring, starts_ms = self._wiring, np.asarray(self.starts_ms)
        table, actions = wiring.schedule.table, np.arange(len(starts_ms))
        kind, chunk, evictor = (of[self._rows] for of in (table.kind, table.chunk, table.evictor))
        _, leaving, of_leaving = wiring.leaving(self.stage)
        waited = np.repeat(actions, wiring.waits(self.stage)[0])
        waited = np.append(waited, np.full(len(leaving) - len(waited), len(actions)))
        comes, ends = np.flatnonzero(_COMES[kind]), np.flatnonzero(_AT_END[kind])
        at_ms = np.concatenate([self.gone_ms, starts_ms[comes], starts_ms[ends] + takes_ms[ends]])
        order = np.lexsort((np.concatenate([3 * waited, 3 * comes + 1, 3 * ends + 2]), at_ms))
        goes, come = np.full(len(leaving), UnitChange.GOES), np.full(len(comes), UnitChange.COMES)
        changes = np.concatenate([goes, come, _AT_END[kind[ends]]])
        own = np.where(evictor < 0, self.stage, evictor)
        owners = np.concatenate([leaving, own[comes], own[ends]])
        chunks = np.concatenate([of_leaving, chunk[comes], chunk[ends]])
        return at_ms[order], changes[order], owners[order], chunks[order]

    def spans(self) -> tuple[Span, ...]:
        """When each action was, in the order of the schedule; only after the walk."""
        sent = self._network.start_ms, self._network.end_ms
        moves = _numbers(self._wiring.moves[self._rows])
        each = zip(self._actions, self.starts_ms, self._each_takes_ms().tolist(), moves, strict=True)
        return tuple(
            Span(action, sent[0][moved], sent[1][moved])
            if action.kind in _TRANSFERS
            else Span(action, start_ms, start_ms + takes_ms)
            for action, start_ms, takes_ms, moved in each
        )


def _numbers(column: Column) -> array[int]:
    """Return a column of which Python reads one number after the other quickly."""
    numbers = array("i")
    numbers.frombytes(column.astype("i").tobytes())
    return numbers
