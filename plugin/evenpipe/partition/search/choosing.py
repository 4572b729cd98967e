"""The cuts with which a batch is fastest, messages included, and a front of others by bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from math import comb, inf
from typing import Final, NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.dawnpiper.capuchin import Fit
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.search.batch_clock import BatchClock
from evenpipe.partition.search.exact import best_partition, shortest
from evenpipe.partition.search.plan import Algorithm, Alternative, Crossing

__all__ = ["Reached", "Way", "fastest_batch", "longest_ms"]

#: So many layer cuts are all simulated; of more, the best is climbed to.
_MOST_ROWS: Final = 25_000
#: Boundaries that are moved in all combinations at once, when whole runs of them cannot be moved any more.
_MOST_TOGETHER: Final = 7
#: How far boundaries are moved together, as parts of a position's mean time.
_PARTS: Final = tuple(sign / 2**power for power in range(1, 8) for sign in (1, -1))
#: How many times the least bytes nearby a place may send: quiet places at first, and then all.
_RATIOS: Final = (1.0, 1.5, 2.5, inf)
#: How far nearby is, as a part of a position's mean time.
_NEARBY: Final = 1 / 4
#: How many rows that are faster by the clock are weighed until one fits.
_TRIES: Final = 8
#: How many ranges are weighed for what they recompute and swap, for each way to cut.
_MOST_WEIGHED: Final = 30
#: A smaller gain than this part is not worth a step.
_GAIN: Final = 1e-4
#: Of choices slower than the fastest by less than this, and no slower than layer cuts, the most even is taken.
_AS_FAST: Final = 1.01
_ROUNDING: Final = 1e-9

#: From all boundaries to rows of others.
Moves = Callable[[tuple[int, ...]], Numbers]


class Choice(NamedTuple):
    """A partition that fits. ratios: for each view of the clock, its milliseconds over the fastest layer cuts'."""

    ratios: tuple[float, ...]
    cuts: tuple[int, ...]
    fits: tuple[Fit, ...]

    @property
    def rank(self) -> float:
        return max(self.ratios)

    @property
    def extra_ms(self) -> list[float]:
        return [way.extra_ms for way in self.fits]


class Chooser:
    """Weighs partitions of a problem by the clock, against the fastest layer cuts.

    `most_weighed`: how many ranges (`Problem.weighed`) may be weighed for what they recompute and swap.
    """

    def __init__(self, problem: Problem, clock: BatchClock, most_weighed: float) -> None:
        self.problem, self.clock = problem, clock
        self._most_weighed = problem.weighed + most_weighed
        self._unit_ms: Numbers = np.ones(clock.views)
        layers = [choice for view in range(clock.views) if (choice := self._fastest_layers(view)) is not None]
        if layers:
            self._unit_ms = np.array([self._ms(choice)[view] for view, choice in enumerate(layers)])
        self.layers = [self._rated(choice) for choice in layers]

    def choice(
        self, cuts: Sequence[int], guessed: Sequence[float] = (), ratios: Numbers | None = None
    ) -> Choice | None:
        """Return the partition with these cuts; None where a part or a stage does not fit.

        `ratios`: its ratios if its parts take the extra milliseconds that are `guessed`.
        """
        cells = self.problem.cells(cuts)
        if cells is None:
            return None
        fits = tuple(cell.fit for cell in cells)
        if ratios is not None and [way.extra_ms for way in fits] == list(guessed) and self._fits(cuts, fits):
            return Choice(tuple(ratios.tolist()), tuple(cuts), fits)
        return self.of(cuts, fits)

    def of(self, cuts: Sequence[int], fits: Sequence[Fit]) -> Choice | None:
        """Return the partition whose parts fit in this way; None where a stage does not fit."""
        if not self._fits(cuts, fits):
            return None
        return self._rated(Choice((), tuple(cuts), tuple(fits)))

    def _fits(self, cuts: Sequence[int], fits: Sequence[Fit]) -> bool:
        return max(self.problem.peaks_of(cuts, fits)) <= self.problem.limit_bytes

    def batch_ms(self, choice: Choice) -> float:
        """Return the ms of a batch: of a stream, the mean of several without a flush."""
        return choice.ratios[-1] * float(self._unit_ms[-1])

    def _rated(self, choice: Choice) -> Choice:
        return choice._replace(ratios=tuple((self._ms(choice) / self._unit_ms).tolist()))

    def _ms(self, choice: Choice) -> Numbers:
        ms: Numbers = self.clock.ms(np.array([choice.cuts]), np.array([choice.extra_ms]))[0]
        return ms

    def climbed(self, start: Choice) -> Choice:
        """Return `start` with its boundaries moved until no move is faster."""
        return self._climbed(start, self._moves(), lambda ratios: ratios.max(axis=-1))

    def _climbed(self, start: Choice, moves: Moves, of: Callable[[Numbers], Numbers]) -> Choice:
        """`of`: of rows of ratios, the value to minimise."""
        best = start
        while self.problem.weighed < self._most_weighed:
            rows = moves(best.cuts)
            below = float(of(np.array(best.ratios))) * (1 - _GAIN)
            better = self._first(rows, best.extra_ms, below, of) if len(rows) else None
            if better is None:
                return best
            best = better
        return best

    def _first(
        self, rows: Numbers, extra_ms: Sequence[float], below: float, of: Callable[[Numbers], Numbers]
    ) -> Choice | None:
        """Return the fastest of the rows that fits and is below that. Stages are taken to pay the same extra ms."""
        ratios = self.clock.ms(rows, np.broadcast_to(extra_ms, (len(rows), len(extra_ms)))) / self._unit_ms
        ranks = of(ratios)
        for row in np.argsort(ranks, kind="stable")[:_TRIES].tolist():
            if ranks[row] >= below or self.problem.weighed >= self._most_weighed:
                return None
            choice = self.choice(rows[row].tolist(), extra_ms, ratios[row])
            if choice is not None and of(np.array(choice.ratios)) < below:
                return choice
        return None

    def _fastest_layers(self, view: int) -> Choice | None:
        """Return the layer cuts that are fastest in a view of the clock, of those that fit; None: none is known."""
        layers, count = np.array(self.problem.costs.layers), self.problem.copies.positions
        if len(layers) <= count:
            return None
        ms = [self.problem.lower_ms(position, layers, layers)[0] for position in range(count)]
        if comb(len(layers) - 2, count - 1) <= _MOST_ROWS:
            inner = np.array(list(combinations(range(1, len(layers) - 1), count - 1)), np.int64).reshape(-1, count - 1)
        else:
            path, longest = shortest([ms[0][:1], *ms[1:-1], ms[-1][:, -1:]], np.maximum)
            inner = np.array([path[1:-1]] if longest < inf else [], np.int64).reshape(-1, count - 1)
        best = self._fitting(layers, inner, ms, view)
        at = {int(boundary): number for number, boundary in enumerate(layers)}
        for steps in _steps(count - 1) if best is not None else ():

            def moves(cuts: tuple[int, ...], steps: Numbers = steps) -> Numbers:
                return layers[_valid(np.array([at[cut] for cut in cuts]) + steps)]

            assert best is not None
            best = self._climbed(best, moves, lambda ratios: ratios[..., view])
        return best

    def _fitting(self, layers: Numbers, inner: Numbers, ms: Sequence[Numbers], view: int) -> Choice | None:
        """Return the fastest of rows of layers' numbers that fits."""
        ends = np.zeros((len(inner), 1), np.int64)
        rows = np.hstack([ends, inner, ends + len(layers) - 1])
        least_ms = np.stack([of[rows[:, k], rows[:, k + 1]] for k, of in enumerate(ms)], axis=1)
        may_fit = np.isfinite(least_ms).all(axis=1)
        if not may_fit.any():
            return None
        cuts = layers[rows[may_fit]]
        extra_ms = least_ms[may_fit] - np.diff(self.problem.costs.upto_ms[cuts], axis=1)
        order = np.argsort(self.clock.ms(cuts, extra_ms)[:, view], kind="stable")
        weighed = (self.choice(cuts[row].tolist()) for row in order[: 4 * _TRIES].tolist())
        return next((choice for choice in weighed if choice is not None), None)

    def _moves(self) -> Moves:
        costs, count = self.problem.costs, self.problem.copies.positions
        upto, mean_ms = costs.upto_ms, costs.upto_ms[-1] / count
        places = [_places_within(self.problem, ratio) for ratio in _RATIOS]
        runs = np.array(list(_runs(count - 1)))

        def moves(cuts: tuple[int, ...]) -> Numbers:
            """Runs of boundaries move by the same time, to the nearest of quiet places, or of all."""
            at_ms = upto[list(cuts[1:-1])]
            inner = []
            for part in _PARTS:
                to_ms = at_ms + part * mean_ms
                for among in places:
                    moved = among[np.abs(upto[among][:, None] - to_ms).argmin(axis=0)]
                    inner.append(np.where(runs, moved, cuts[1:-1]))
            unique = np.unique(np.concatenate(inner), axis=0)
            ends = np.zeros((len(unique), 1), np.int64)
            rows = _valid(np.hstack([ends, unique, ends + costs.last]))
            others: Numbers = rows[(rows != np.array(cuts)).any(axis=1)]
            return others

        return moves


def _places_within(problem: Problem, ratio: float) -> Numbers:
    """Return the inner boundaries that send at most so many times the least bytes nearby."""
    costs = problem.costs
    if ratio == inf:
        return np.arange(1, costs.last)
    return costs.quiet(costs.upto_ms[-1] * _NEARBY / problem.copies.positions, ratio)


def _valid(rows: Numbers) -> Numbers:
    return rows.compress((np.diff(rows, axis=1) > 0).all(axis=1), axis=0)


def _steps(inner: int) -> Iterator[Numbers]:
    """Yield rows of how many places all boundaries move at once: runs of them, then all combinations; ends stay."""
    steps = [[[by * moves for moves in run] for run in _runs(inner) for by in (-2, -1, 1, 2)]]
    if inner <= _MOST_TOGETHER:
        steps.append([list(row) for row in product((-1, 0, 1), repeat=inner) if any(row)])
    for rows in steps:
        yield np.pad(np.array(rows), ((0, 0), (1, 1)))


def _runs(inner: int) -> Iterator[list[bool]]:
    """Yield, for each run of neighbouring boundaries, which are in it."""
    for first in range(inner):
        for last in range(first, inner):
            yield [first <= number <= last for number in range(inner)]


class Way(NamedTuple):
    """Boundaries, from 0 to the last, how each part fits, and which algorithm made them."""

    algorithm: Algorithm
    cuts: tuple[int, ...]
    fits: tuple[Fit, ...]


def longest_ms(problem: Problem, way: Way | Choice) -> float:
    """Return the ms of the longest position for a micro-batch."""
    ms = np.diff(problem.costs.upto_ms[list(way.cuts)]) + [fit.extra_ms for fit in way.fits]
    return float(ms.max())


class Reached(NamedTuple):
    """Time of a batch with messages, and of the other candidates: fields of a plan."""

    batch_ms: float | None = None
    layers_batch_ms: float | None = None
    crossings: tuple[Crossing, ...] = ()
    front: tuple[Alternative, ...] = ()


def fastest_batch(problem: Problem, clock: BatchClock, ways: Sequence[Way]) -> tuple[Way | None, Reached]:
    """Return the way to cut with which a batch is fastest, and its figures; None where nothing is known to fit.

    Candidates are `ways`, the exact search's among cuts that send little, and layer cuts. The boundaries of the fastest
    of all, and of the layer cuts, are then moved.
    """
    most = inf if problem.optimize == "none" else _MOST_WEIGHED
    chooser = Chooser(problem, clock, most)
    candidates: list[tuple[Algorithm, Choice | None]] = [
        (way.algorithm, chooser.of(way.cuts, way.fits)) for way in ways
    ]
    for ratio in _RATIOS[:-1] if problem.optimize == "none" and problem.copies.separable else _RATIOS[:1]:
        places = _places_within(problem, ratio)
        quiet = best_partition(problem.among(places), problem.weighed + most) if len(places) else None
        candidates += [("quiet", chooser.of(quiet.cuts, quiet.fits))] if quiet is not None else []
    candidates += [("layers", choice) for choice in chooser.layers]
    known = [(algorithm, choice) for algorithm, choice in candidates if choice is not None]
    if not known:
        return None, Reached()
    for start in {min((choice for _, choice in known), key=lambda choice: choice.rank), *chooser.layers}:
        known.append(("moved", chooser.climbed(start)))
    algorithm, best = _best(problem, known)
    reached = Reached(
        chooser.batch_ms(best),
        chooser.batch_ms(chooser.layers[-1]) if chooser.layers else None,
        clock.crossings(best.cuts),
        _front([_alternative(chooser, *candidate) for candidate in known]),
    )
    return Way(algorithm, best.cuts, best.fits), reached


def _best(problem: Problem, known: Sequence[tuple[Algorithm, Choice]]) -> tuple[Algorithm, Choice]:
    """Return the fastest; of those that are nearly as fast, and no slower than layer cuts, the most even.

    Where none is as fast as layer cuts in all views, the last view counts.
    """
    fastest = min(choice.rank for _, choice in known)
    if fastest > 1 + _ROUNDING:
        return min(known, key=lambda candidate: candidate[1].ratios[-1])
    enough = max(fastest, min(1 + _ROUNDING, fastest * _AS_FAST))
    near = [candidate for candidate in known if candidate[1].rank <= enough]
    return min(near, key=lambda candidate: longest_ms(problem, candidate[1]))


def _alternative(chooser: Chooser, algorithm: Algorithm, choice: Choice) -> Alternative:
    costs, cuts = chooser.problem.costs, choice.cuts
    return Alternative(
        algorithm=algorithm,
        cuts=tuple(int(start) - 1 for start in costs.starts[list(cuts[1:-1])]),
        max_stage_ms=longest_ms(chooser.problem, choice),
        sent_bytes=int(costs.cut_bytes[list(cuts)].sum()),
        batch_ms=chooser.batch_ms(choice),
    )


def _front(every: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """Return the ways to cut that no other beats in both the slowest stage and the bytes sent."""
    front = list[Alternative]()
    for way in sorted(every, key=lambda way: (way.max_stage_ms, way.sent_bytes, way.batch_ms)):
        if not front or way.sent_bytes < front[-1].sent_bytes:
            front.append(way)
    return tuple(front)
