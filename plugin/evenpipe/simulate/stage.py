"""One stage's clock: walk its actions in order, computing, starting transfers, and waiting where it must."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import count, islice

from evenpipe.schedule import KINDS, OWN_ENDS, Action, Column, Program
from evenpipe.simulate.costs import Costs
from evenpipe.simulate.network import Network
from evenpipe.simulate.result import MemoryCurve, Span

__all__ = ["StageClock"]

_HELD = {letter: row.held for letter, row in KINDS.items()}
_TRANSFERS = frozenset(letter for letter, row in KINDS.items() if row.link is not None)
#: What a stage waits for under synchronous transfers: the evictor's ends.
_OF_PAIRS = frozenset(letter for letter in _TRANSFERS if KINDS[letter].held and not KINDS[letter].guest)
_NO_POST = -1, -1


class StageClock:
    """Time and memory of one stage; ``action`` is the last it came to."""

    def __init__(
        self, program: Program, stage: int, costs: Costs, network: Network, unit_bytes: Sequence[Sequence[int]] | None
    ) -> None:
        wiring = program.wiring
        self.stage = stage
        self.now_ms = 0.0
        self.busy_ms = 0.0
        self.memory = MemoryCurve(unit_bytes)
        self.action: Action | None = None
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
            self.action = action
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
        for message in wiring.moves[wiring.left_over(stage)].tolist():
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
