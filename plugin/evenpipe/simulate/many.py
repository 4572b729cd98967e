"""One program under many costs at once: how long it takes, as the clock of :func:`simulate` has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from evenpipe.schedule import KINDS, OWN_ENDS, Program

__all__ = ["ManyCosts"]

Times = NDArray[np.float64]

_TRANSFERS = frozenset(letter for letter, row in KINDS.items() if row.link is not None)
#: The share of a stage's forward, and of its backward, that an action takes; backwards in two are halves.
_SHARES: Final = {
    "forward": (1.0, 0.0),
    "backward": (0.0, 1.0),
    "input_gradient": (0.0, 0.5),
    "weight_gradient": (0.0, 0.5),
}
#: So many rows at a time, so that times of all messages find room.
_ROWS: Final = 4096


class ManyCosts:
    """A verified program's makespan as sums and maxima, recorded once: the order of a walk is the same for all times.

    Rows of costs take little longer than one simulation. Equal to `simulate(...).makespan_ms` row by row.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._sums: list[tuple[np.ufunc, int, int, int]] = []
        self._slots = 0
        wiring, stages = program.wiring, range(program.schedule.stages)
        self._zero = self._slot()
        self._takes = [{row.letter: self._slot() for row in KINDS.values() if row.cost is not None} for _ in stages]
        self._transmit, self._latency, self._free = ([self._slot() for _ in wiring.links] for _ in range(3))
        self._link_of: list[int] = wiring.link_of.tolist()
        self._start: dict[int, int] = {}
        self._end: dict[int, int] = {}
        self._waiting: dict[int, list[int]] = {}
        self._woken = deque(stages)
        now = [self._slot() for _ in stages]
        walks = [self._walk(stage, now[stage]) for stage in stages]
        while self._woken:
            stage = self._woken.popleft()
            wanted = next(walks[stage], None)
            if wanted is not None:
                self._waiting.setdefault(wanted, []).append(stage)
        self._makespan = self._slot()
        for at in now:
            self._sums.append((np.maximum, self._makespan, self._makespan, at))

    def makespans(self, forward_ms: Times, backward_ms: Times, transmit_ms: Times, latency_ms: Times) -> Times:
        """Return the milliseconds of the program for each row of costs.

        forward_ms, backward_ms: rows × stages, as in `Costs`. transmit_ms, latency_ms: rows × links, of the wires of
        `program.wiring.links` in their order.
        """
        costs = forward_ms, backward_ms, transmit_ms, latency_ms
        parts = range(0, len(forward_ms), _ROWS)
        return np.concatenate([self._run(*(ms[at : at + _ROWS].T.copy() for ms in costs)) for at in parts])

    def _run(self, forward_ms: Times, backward_ms: Times, transmit_ms: Times, latency_ms: Times) -> Times:
        ms: list[Any] = [np.zeros(forward_ms.shape[1])] * self._slots
        chunks = self._program.schedule.chunks
        for stage, takes in enumerate(self._takes):
            for letter, slot in takes.items():
                forward, backward = _SHARES[KINDS[letter].cost or "forward"]
                ms[slot] = (forward * forward_ms[stage] + backward * backward_ms[stage]) / chunks
        for number, (transmit, latency) in enumerate(zip(self._transmit, self._latency, strict=True)):
            ms[transmit], ms[latency] = transmit_ms[number], latency_ms[number]
        for joined, to, one, other in self._sums:
            ms[to] = joined(ms[one], ms[other])
        found: Times = ms[self._makespan]
        return found

    def _slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def _later(self, at: int, than: int) -> None:
        """`at` is no earlier than that."""
        if at != than:
            self._sums.append((np.maximum, at, at, than))

    def _copy(self, of: int) -> int:
        found = self._slot()
        self._sums.append((np.maximum, found, of, of))
        return found

    def _issue(self, message: int, at: int) -> None:
        """As `Network.issue`."""
        if message not in self._start:
            self._start[message] = self._copy(at)
            return
        link, free = self._link_of[message], self._free[self._link_of[message]]
        self._later(free, at)
        self._later(free, self._start[message])
        self._sums.append((np.add, free, free, self._transmit[link]))
        self._end[message] = end = self._slot()
        self._sums.append((np.add, end, free, self._latency[link]))
        self._woken.extend(self._waiting.pop(message, ()))

    def _walk(self, stage: int, now: int) -> Iterator[int]:
        """As the walk of a stage in `simulator.py`."""
        wiring, ends = self._program.wiring, self._end
        rows = wiring.schedule.table.of(stage)
        takes = self._takes[stage]
        posts = zip(*(column.tolist() for column in self._program.order.posts(stage)), strict=True)
        leaving = iter(wiring.leaving(stage)[0].tolist())
        posted, received = next(posts, (-1, -1))
        columns = (column.tolist() for column in (*wiring.waits(stage), wiring.moves[rows]))
        for number, action, departing, loaded, taken, settled, moved in zip(
            count(rows.start), wiring.schedule.actions[stage], *columns, strict=False
        ):
            while posted == number:
                self._issue(received, now)
                posted, received = next(posts, (-1, -1))
            moves_by_itself = action.kind in _TRANSFERS
            free = self._copy(now) if moves_by_itself else now
            for message in islice(leaving, departing):
                if message not in ends:
                    yield message
                self._later(free, ends[message])
            for message in (loaded, taken, settled):
                if message >= 0:
                    if message not in ends:
                        yield message
                    self._later(now, ends[message])
            self._later(free, now)
            if action.kind in takes:
                self._sums.append((np.add, now, now, takes[action.kind]))
            if moved >= 0:
                self._issue(moved, now if action.kind in takes else free)
                if action.kind in OWN_ENDS:
                    self._issue(moved, free)
        for message in (*leaving, *wiring.left_over(stage).tolist()):
            if message not in ends:
                yield message
            self._later(now, ends[message])
