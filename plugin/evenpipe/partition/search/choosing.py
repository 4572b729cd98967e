"""The ways to cut a model that a batch is fastest with, messages included: a front by bytes sent, and layer cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product
from math import comb, inf
from typing import Final, NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.dawnpiper.capuchin import Fit
from evenpipe.partition.dawnpiper.problem import Cell, Problem
from evenpipe.partition.search.batch_clock import BatchClock
from evenpipe.partition.search.exact import best_partition
from evenpipe.partition.search.plan import Algorithm, Alternative, Crossing

__all__ = ["Choice", "Chooser", "Reached", "Way", "fastest_batch", "places_within"]

#: Layer cuts of which all are simulated, in rows × actions of the schedule; of more, the best is climbed to.
_MOST_ROWS: Final = 25_000
#: Boundaries that are moved in all combinations at once, when whole runs of them cannot be moved any more.
_MOST_TOGETHER: Final = 7
#: How far boundaries are moved together, as parts of a position's mean time.
_PARTS: Final = tuple(sign / 2**power for power in range(1, 8) for sign in (1, -1))
#: How many times what the least nearby sends a place may send: those that cut little, and then all.
_RATIOS: Final = (1.0, 1.5, 2.5, inf)
#: Of a position's mean time, what is nearby.
_NEARBY: Final = 1 / 4
#: How many of the rows that are faster by the clock are weighed, until one fits.
_TRIES: Final = 8
#: How many ranges are weighed for what they recompute and swap, for each way to cut.
_MOST_WEIGHED: Final = 30
#: What is less faster than this part is not worth a step.
_GAIN: Final = 1e-4
#: Of what is slower than the fastest by less than this, and no slower than layer cuts, the most even is taken.
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
        return [one.extra_ms for one in self.fits]


class Chooser:
    """Weighs partitions of a problem by the clock, against the fastest layer cuts.

    `most_weighed`: how many ranges (`Problem.weighed`) may be weighed for what they recompute and swap.
    """

    def __init__(self, problem: Problem, clock: BatchClock, most_weighed: float) -> None:
        self.problem, self.clock = problem, clock
        self._most_weighed = problem.weighed + most_weighed
        self._unit_ms: Numbers = np.ones(clock.views)
        every = [found for view in range(clock.views) if (found := self._fastest_layers(view)) is not None]
        if every:
            self._unit_ms = np.array([self._ms(one)[view] for view, one in enumerate(every)])
        self.layers = [self._rated(one) for one in every]

    def choice(
        self, cuts: Sequence[int], guessed: Sequence[float] = (), ratios: Numbers | None = None
    ) -> Choice | None:
        """Return the partition with these cuts; None where a part or a stage does not fit.

        `ratios`: what it has if its parts take the extra milliseconds that are `guessed`.
        """
        cells = list[Cell]()
        for position, ends in enumerate(pairwise(cuts)):
            cell = self.problem.cell(position, *ends) if ends[0] < ends[1] else None
            if cell is None:
                return None
            cells.append(cell)
        fits = tuple(cell.fit for cell in cells)
        if ratios is not None and [one.extra_ms for one in fits] == list(guessed) and self._fits(cuts, fits):
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
        """Return what a batch takes: of a stream, the mean of several without a flush."""
        return choice.ratios[-1] * float(self._unit_ms[-1])

    def _rated(self, choice: Choice) -> Choice:
        return choice._replace(ratios=tuple((self._ms(choice) / self._unit_ms).tolist()))

    def _ms(self, choice: Choice) -> Numbers:
        """Return its milliseconds in each view."""
        found: Numbers = self.clock.ms(np.array([choice.cuts]), np.array([choice.extra_ms]))[0]
        return found

    def climbed(self, start: Choice) -> Choice:
        """Return `start`, or what moving its boundaries makes of it until no move is faster."""
        return self._climbed(start, self._moves(), lambda ratios: ratios.max(axis=-1))

    def _climbed(self, start: Choice, moves: Moves, of: Callable[[Numbers], Numbers]) -> Choice:
        """`of`: what is to become least, of rows of ratios."""
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
        """Return the fastest of the rows that fits and is below that. What else stages pay is taken to stay."""
        ratios = self.clock.ms(rows, np.broadcast_to(extra_ms, (len(rows), len(extra_ms)))) / self._unit_ms
        ranks = of(ratios)
        for row in np.argsort(ranks, kind="stable")[:_TRIES].tolist():
            if ranks[row] >= below or self.problem.weighed >= self._most_weighed:
                return None
            found = self.choice(rows[row].tolist(), extra_ms, ratios[row])
            if found is not None and of(np.array(found.ratios)) < below:
                return found
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
            inner = np.array(_shortest(ms), np.int64).reshape(-1, count - 1)
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
        taken = np.stack([of[rows[:, k], rows[:, k + 1]] for k, of in enumerate(ms)], axis=1)
        rows, taken = rows[np.isfinite(taken).all(axis=1)], taken[np.isfinite(taken).all(axis=1)]
        if not len(rows):
            return None
        cuts = layers[rows]
        extra_ms = taken - np.diff(self.problem.costs.upto_ms[cuts], axis=1)
        order = np.argsort(self.clock.ms(cuts, extra_ms)[:, view], kind="stable")
        weighed = (self.choice(cuts[row].tolist()) for row in order[: 4 * _TRIES].tolist())
        return next((one for one in weighed if one is not None), None)

    def _moves(self) -> Moves:
        costs, count = self.problem.costs, self.problem.copies.positions
        upto, mean_ms = costs.upto_ms, costs.upto_ms[-1] / count
        places = [places_within(self.problem, ratio) for ratio in _RATIOS]
        runs = np.array(list(_runs(count - 1)))

        def moves(cuts: tuple[int, ...]) -> Numbers:
            """Runs of boundaries move by the same time, to the nearest of quiet places, or of all."""
            at_ms = upto[list(cuts[1:-1])]
            found = []
            for part in _PARTS:
                to_ms = at_ms + part * mean_ms
                for among in places:
                    moved = among[np.abs(upto[among][:, None] - to_ms).argmin(axis=0)]
                    found.append(np.where(runs, moved, cuts[1:-1]))
            inner = np.unique(np.concatenate(found), axis=0)
            ends = np.zeros((len(inner), 1), np.int64)
            rows = _valid(np.hstack([ends, inner, ends + costs.last]))
            others: Numbers = rows[(rows != np.array(cuts)).any(axis=1)]
            return others

        return moves


def places_within(problem: Problem, ratio: float) -> Numbers:
    """Return the inner boundaries that send at most so many times what the least nearby sends."""
    costs = problem.costs
    if ratio == inf:
        return np.arange(1, costs.last)
    upto, sent = costs.upto_ms, costs.cut_bytes
    near = upto[-1] * _NEARBY / problem.copies.positions
    low = np.maximum(np.searchsorted(upto, upto - near, "left"), 1)
    high = np.minimum(np.searchsorted(upto, upto + near, "right"), costs.last)
    return np.array([k for k in range(1, costs.last) if sent[k] <= ratio * sent[low[k] : high[k]].min()])


def _valid(rows: Numbers) -> Numbers:
    found: Numbers = rows[(np.diff(rows, axis=1) > 0).all(axis=1)]
    return found


def _steps(inner: int) -> Iterator[Numbers]:
    """Yield rows of how many places all boundaries move at once: runs of them, then all combinations; ends stay."""
    steps = [[[by * one for one in run] for run in _runs(inner) for by in (-2, -1, 1, 2)]]
    if inner <= _MOST_TOGETHER:
        steps.append([list(row) for row in product((-1, 0, 1), repeat=inner) if any(row)])
    for rows in steps:
        yield np.pad(np.array(rows), ((0, 0), (1, 1)))


def _runs(inner: int) -> Iterator[list[bool]]:
    """Yield, for each run of neighbouring boundaries, which are in it."""
    for first in range(inner):
        for last in range(first, inner):
            yield [first <= number <= last for number in range(inner)]


def _shortest(ms: Sequence[Numbers]) -> list[list[int]]:
    """Return the layers' numbers with which the longest position is shortest by these matrices; none: nothing fits."""
    reached, back = ms[0][0], list[Numbers]()
    for of in ms[1:]:
        ways = np.maximum(reached[:, None], of)
        back.append(ways.argmin(axis=0))
        reached = ways.min(axis=0)
    if not np.isfinite(reached[-1]):
        return []
    path = [len(reached) - 1]
    for came in reversed(back):
        path.append(int(came[path[-1]]))
    return [path[:0:-1]]


class Way(NamedTuple):
    """Boundaries, from 0 to the last, how each part fits, and which algorithm made them."""

    algorithm: Algorithm
    cuts: tuple[int, ...]
    fits: tuple[Fit, ...]

    def longest_ms(self, problem: Problem) -> float:
        """Return what its longest position takes for a micro-batch."""
        ms = np.diff(problem.costs.upto_ms[list(self.cuts)]) + [one.extra_ms for one in self.fits]
        return float(ms.max())


class Reached(NamedTuple):
    """Time of a batch with messages, and of the other candidates: fields of a plan."""

    batch_ms: float | None = None
    layers_batch_ms: float | None = None
    crossings: tuple[Crossing, ...] = ()
    front: tuple[Alternative, ...] = ()


def fastest_batch(problem: Problem, clock: BatchClock, ways: Sequence[Way]) -> tuple[Way | None, Reached]:
    """Return the way to cut with which a batch is fastest, and what it reaches; None where nothing is known to fit.

    Candidates are `ways`, the exact search's among cuts that send little, and layer cuts. The boundaries of the fastest
    of all, and of the layer cuts, are then moved.
    """
    most = inf if problem.optimize == "none" else _MOST_WEIGHED
    chooser = Chooser(problem, clock, most)
    found: list[tuple[Algorithm, Choice | None]] = [(way.algorithm, chooser.of(way.cuts, way.fits)) for way in ways]
    for ratio in _RATIOS[:-1] if problem.optimize == "none" and problem.copies.separable else _RATIOS[:1]:
        places = places_within(problem, ratio)
        quiet = best_partition(problem.among(places), problem.weighed + most) if len(places) else None
        found += [("quiet", chooser.of(quiet.cuts, quiet.fits))] if quiet is not None else []
    found += [("layers", one) for one in chooser.layers]
    known = [(algorithm, one) for algorithm, one in found if one is not None]
    if not known:
        return None, Reached()
    for start in {min((one for _, one in known), key=lambda one: one.rank), *chooser.layers}:
        known.append(("moved", chooser.climbed(start)))
    algorithm, best = _best(problem, known)
    every = [_alternative(chooser, *one) for one in known]
    reached = Reached(
        chooser.batch_ms(best),
        chooser.batch_ms(chooser.layers[-1]) if chooser.layers else None,
        clock.crossings(best.cuts),
        _front(every),
    )
    return Way(algorithm, best.cuts, best.fits), reached


def _best(problem: Problem, known: Sequence[tuple[Algorithm, Choice]]) -> tuple[Algorithm, Choice]:
    """Return the fastest; of those that are nearly as fast, and no slower than layer cuts, the most even.

    Where none is as fast as layer cuts in all views, the last view counts.
    """
    fastest = min(one.rank for _, one in known)
    if fastest > 1 + _ROUNDING:
        return min(known, key=lambda one: one[1].ratios[-1])
    near = [one for one in known if one[1].rank <= max(fastest, min(1 + _ROUNDING, fastest * _AS_FAST))]
    return min(near, key=lambda one: Way(one[0], one[1].cuts, one[1].fits).longest_ms(problem))


def _alternative(chooser: Chooser, algorithm: Algorithm, choice: Choice) -> Alternative:
    costs, cuts = chooser.problem.costs, choice.cuts
    return Alternative(
        algorithm=algorithm,
        cuts=tuple(int(start) - 1 for start in costs.starts[list(cuts[1:-1])]),
        max_stage_ms=Way(algorithm, cuts, choice.fits).longest_ms(chooser.problem),
        sent_bytes=int(costs.cut_bytes[list(cuts)].sum()),
        batch_ms=chooser.batch_ms(choice),
    )


def _front(every: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """Return those of which none else is as good in both: the slowest stage, and bytes sent."""
    front = list[Alternative]()
    for one in sorted(every, key=lambda one: (one.max_stage_ms, one.sent_bytes, one.batch_ms)):
        if not front or one.sent_bytes < front[-1].sent_bytes:
            front.append(one)
    return tuple(front)
