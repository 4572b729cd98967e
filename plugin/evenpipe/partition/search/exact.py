"""The partition whose longest stage is shortest, by dynamic programming over windows of cuts, and branch and bound."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.dawnpiper.capuchin import Load
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.search.filling import Partition, filled_reach, nudged, partition_of, seed

__all__ = ["best_partition", "search", "shortest"]

#: How far above the least conceivable time stages may be in each attempt; the last leaves none out.
_WIDTHS = (1.01, 1.04, 1.12, 1.3, 1.7, 2.5, inf)
#: How many paths are weighed for a good one before the best is sought.
_GUESSES = 12
#: How many more ranges than asked for are weighed if none makes up a partition yet.
_PATIENCE = 30
#: How many are weighed before it is asked whether anything fits at all.
_AT_FIRST = 20
#: How many are weighed at the end to move boundaries of a partition that is not proven to be the best.
_AFTERWARDS = 10
#: Places of a cut among which one is sought where there is no time for a proof.
_PLACES = 96
#: A partition that is above the lower bound by no more than this part ends the search.
_NEAR = 8e-4
#: Of partitions slower than that by less than this part, the one that sends least over its cuts is taken (B.2).
_AS_FAST = 1.5e-4
#: How many times the exact search runs at most; then the best known partition is taken, with a lower bound.
_MOST_SEARCHES = 40
#: How many of these may go into finding something that fits, before the best is sought.
_MOST_DIVES = 16


def search(problem: Problem, most_weighed: float = inf) -> Partition | None:
    """Return the best partition; None: none fits.

    After `most_weighed` weighed ranges the best partition of these is taken, and `optimum_ms` may be further below it.
    Without one the search ends a little later, so it may miss a partition that hardly fits.

    Why nothing that is left out can matter. (1) Some stage takes at least the mean, and one with the longest piece
    between two boundaries at least that; so attempts begin there. (2) If no stage takes more than w, then k stages take
    at most k·w, so the cut behind stage k lies where at most k·w is before it, and at most (n − k)·w behind. (3) A
    range that fails `Problem.may_fit` fails it with more nodes too, so filling stages from the left as far as they go
    gives the last place of each cut, and from the right the first. (4) An attempt finds the best of the partitions in
    which no stage takes more than w: if there is any, it is the best of all. One that takes more makes the next attempt
    the last, with w as long as it takes. (5) `Problem.lower_ms` is never more than a range takes. So no path takes less
    than the best one by lower bounds, of which the ranges are weighed in turn, until one that has been takes no more.
    (6) Taken as given: a range that does not fit, with all recomputed or swapped that saves anything, does not with
    more nodes and messages that are no smaller.
    """
    reach = _reach(problem)
    partition = _by_widths(problem, reach, most_weighed) if reach is not None else None
    if partition is None or most_weighed == inf or partition.ms <= partition.optimum_ms * (1 + _NEAR):
        return partition
    return nudged(problem, partition, problem.weighed + _AFTERWARDS)


def _by_widths(problem: Problem, reach: list[tuple[int, int]], most_weighed: float) -> Partition | None:
    """`search`, by attempts of growing width."""
    least = problem.least_ms
    best: Partition | None = None
    narrowed = False
    filled = problem.optimize == "none"
    for width in _WIDTHS:
        most_ms = best.ms if best is not None else least * width
        windows = _windows(problem, reach, most_ms)
        # Without a proof, some of many places are enough.
        thinned = problem.optimize != "none" and most_weighed < inf and max(map(len, windows)) > _PLACES
        if thinned:
            windows = [_thinned(problem, window) for window in windows]
        gives_up = most_weighed + _PATIENCE if filled else problem.weighed + _AT_FIRST
        partition = _Paths(problem, windows, most_ms).best(most_weighed, gives_up) if all(map(len, windows)) else None
        if partition is not None:
            if thinned or narrowed:
                partition = partition._replace(optimum_ms=least)
            if best is not None and best.ms < partition.ms:
                return best._replace(optimum_ms=partition.optimum_ms)
            if best is not None or partition.ms <= most_ms * (1 + 1e-9) or problem.weighed >= most_weighed:
                return partition
            best = partition
        elif best is not None:
            return best
        elif not filled:
            # Nothing is near the mean. Perhaps nothing fits: filling stages in earnest shows that soonest.
            before, filled = problem.weighed, True
            best = seed(problem, least)
            if best is not None and before >= most_weighed:
                return best
            if best is None:
                nearer = filled_reach(problem, reach)
                if nearer is None and most_weighed == inf:
                    return None
                # That does not compare messages, as (6) requires: better partitions may be left out.
                reach, narrowed = nearer or reach, nearer is not None
            most_weighed += problem.weighed - before
            if best is not None and most_weighed < inf:
                best = nudged(problem, best, most_weighed)
    return best


def _reach(problem: Problem) -> list[tuple[int, int]] | None:
    """Return the first and the last place of each boundary of positions by (3); None: nothing fits.

    Where the piece behind a filled position is too much for the next one, that one ends there at most.
    """
    count, last = problem.copies.positions, problem.costs.last
    right, left = [0], [last]
    for position in range(count):
        lasts = np.arange(right[-1] + 1, last + 1)
        fits = problem.may_fit(position, np.array(right[-1:]), lasts)[0]
        right.append(int(lasts[fits].max(initial=right[-1])))
    for position in reversed(range(count)):
        firsts = np.arange(left[-1])
        fits = problem.may_fit(position, firsts, np.array(left[-1:]))[:, 0]
        left.append(int(firsts[fits].min(initial=left[-1])))
    if right[-1] < last or left[-1] > 0:
        return None
    spans = zip(reversed(left), right, strict=True)
    return [(max(k, low), min(last - count + k, high)) for k, (low, high) in enumerate(spans)]


def _windows(problem: Problem, reach: list[tuple[int, int]], most_ms: float) -> list[Numbers]:
    """Return the places that each boundary of positions can have, by (2) and (3)."""
    upto, count = problem.costs.upto_ms, problem.copies.positions
    slack = 1e-9 * upto[-1]
    windows = []
    for number, (low, high) in enumerate(reach):
        if number in (0, count):
            low = high = number and problem.costs.last
        elif np.isfinite(most_ms):
            low = max(low, int(np.searchsorted(upto, upto[-1] - (count - number) * most_ms - slack, "left")))
            high = min(high, int(np.searchsorted(upto, number * most_ms + slack, "right")) - 1)
        window = np.arange(low, high + 1)
        if problem.places is not None and number not in (0, count):
            window = window[np.isin(window, problem.places)]
        windows.append(window)
    return windows


def _thinned(problem: Problem, window: Numbers) -> Numbers:
    """Return the place that sends least of each group of neighbouring places."""
    parts = np.array_split(window, min(len(window), _PLACES)) if len(window) else []
    return np.array([part[problem.costs.cut_bytes[part].argmin()] for part in parts])


class _Paths:
    """Windows of boundaries as layers of a graph; its edges are ranges, with a known time or a lower bound."""

    def __init__(self, problem: Problem, windows: list[Numbers], most_ms: float) -> None:
        self.problem, self.windows, self.most_ms = problem, windows, most_ms
        self.ms, self.known = list[Numbers](), list[Numbers]()
        for position, (firsts, lasts) in enumerate(pairwise(windows)):
            lower, exact = problem.lower_ms(position, firsts, lasts)
            lower[lower > most_ms * (1 + 1e-9)] = inf
            self.ms.append(lower)
            self.known.append(exact)
        self.best_ms = inf

    def best(self, most_weighed: float, gives_up: float) -> Partition | None:
        """Return the path whose longest range is shortest; None: there is none, or none after `gives_up` ranges.

        Good paths are guessed first, with bounds scaled as far as they were off for ranges of the same position. Their
        ranges may take more than the attempt is for; those of better paths do not.
        """
        factors = np.ones(len(self.ms))
        for _ in range(_GUESSES):
            guessed = [np.where(known, ms, ms * by) for ms, known, by in zip(self.ms, self.known, factors, strict=True)]
            path, ms = shortest(guessed, np.maximum)
            if ms == inf or not self._weigh(path, factors) or self._enough(most_weighed):
                break
            if self.best_ms == inf and self.problem.weighed >= gives_up:
                break
        while True:
            path, ms = shortest(self.ms, np.maximum)
            if self.best_ms == inf and (ms == inf or self.problem.weighed >= gives_up):
                return None
            if self.best_ms <= ms * (1 + _NEAR) or self._enough(most_weighed):
                return self._quietest(min(ms, self.most_ms))
            self._weigh(path, factors)

    def _enough(self, most_weighed: float) -> bool:
        return self.best_ms < inf and self.problem.weighed >= most_weighed

    def _weigh(self, path: list[int], factors: Numbers) -> bool:
        """Weigh the ranges of a path; return whether any was not known."""
        open_ranges = [k for k, at in enumerate(pairwise(path)) if not self.known[k][at]]
        for k in open_ranges:
            at = (path[k], path[k + 1])
            cell = self.problem.cell(k, int(self.windows[k][at[0]]), int(self.windows[k + 1][at[1]]))
            if cell is not None and 0 < self.ms[k][at] < inf:
                factors[k] = max(1.0, cell.ms / self.ms[k][at])
            self.ms[k][at] = inf if cell is None else cell.ms
            self.known[k][at] = True
            if cell is None:
                # By (6) no range around it fits either; ranges that are known to fit stay.
                around = slice(at[0] + 1), slice(at[1], None)
                messages = self.problem.costs.messages(self.windows[k][around[0]], self.windows[k + 1][around[1]])
                gone = ~self.known[k][around] & (messages >= messages[-1, 0])
                self.ms[k][around][gone] = inf
                self.known[k][around] |= gone
        longest = max(float(ms[at]) for ms, at in zip(self.ms, pairwise(path), strict=True))
        self.best_ms = min(self.best_ms, longest)
        return bool(open_ranges)

    def _quietest(self, optimum_ms: float) -> Partition:
        """Return the known path that sends least, of those as good as the best."""
        volume = [
            np.where(known & (ms <= self.best_ms * (1 + _AS_FAST)), self.problem.costs.cut_bytes[lasts][None, :], inf)
            for ms, known, lasts in zip(self.ms, self.known, self.windows[1:], strict=True)
        ]
        path, _ = shortest(volume, np.add)
        cuts = [int(window[at]) for window, at in zip(self.windows, path, strict=True)]
        partition = partition_of(self.problem, cuts, optimum_ms)
        assert partition is not None, "only ranges that fit have finite times"
        return partition


def shortest(blocks: list[Numbers], joined: np.ufunc) -> tuple[list[int], float]:
    """Return the path through layers with `blocks` of edges whose edges, `joined`, come to least, and that value."""
    reached, came_from = np.zeros(1), list[Numbers]()
    for block in blocks:
        ways = joined(reached[:, None], block)
        from_where = ways.argmin(axis=0)
        came_from.append(from_where)
        reached = ways[from_where, np.arange(len(from_where))]
    path = [int(reached.argmin())]
    for from_where in reversed(came_from):
        path.append(int(from_where[path[-1]]))
    return path[::-1], float(reached.min())


def best_partition(problem: Problem, most_weighed: float = inf) -> Partition | None:
    """Return the best partition whose stages fit by the schedule's walk; None: none is known.

    `search` gives each position all of a stage's memory, so it is enough where a stage holds parts of one position.
    Stages with several (their own chunks, or a partner's micro-batches) need branch and bound: the result of `search`
    is at least as fast as any that fits. If a stage then holds f1 + f2 + … > M of its positions, then in any partition
    that fits some position k of these has at most its share f_k·M ÷ Σf: were all above, they would exceed M. So the
    problems for each k, with that load, leave nothing out. `most_weighed`: see `search`.
    """
    partition = search(problem, most_weighed)
    if partition is None or problem.copies.separable:
        return partition
    number = count()
    best = _dive(problem, partition, most_weighed)
    bounds = list[float]()
    heap = [(partition.optimum_ms, next(number), partition, problem)]
    for _ in range(_MOST_SEARCHES):
        if not heap or (best is not None and heap[0][0] >= best.ms):
            break
        bound_ms, _, partition, part = heappop(heap)
        too_full = _too_full(part, partition)
        if not too_full:
            bounds.append(bound_ms)
            best = partition if best is None or partition.ms < best.ms else best
            continue
        for position, load in _shares(part, partition, too_full[0]):
            branch = part.with_load(position, load)
            inner = search(branch, most_weighed)
            if inner is not None:
                heappush(heap, (inner.optimum_ms, next(number), inner, branch))
            elif problem.optimize != "none" and most_weighed < inf:
                bounds.append(bound_ms)  # given up, perhaps: it has nothing better than its parent
    if best is None:
        return None
    return best._replace(optimum_ms=min([best.ms, *bounds, *(bound_ms for bound_ms, *_ in heap)]))


def _dive(problem: Problem, partition: Partition, most_weighed: float) -> Partition | None:
    """Return a partition that fits, soon; None: this says nothing of others.

    Every position of a stage that is too full is held to its share of it, again and again.
    """
    for _ in range(_MOST_DIVES):
        too_full = _too_full(problem, partition)
        if not too_full:
            return partition
        for stage in too_full:
            for position, load in _shares(problem, partition, stage):
                problem = problem.with_load(position, load)
        nearer = search(problem, most_weighed)
        if nearer is None:
            return None
        partition = nearer
    return None


def _too_full(problem: Problem, partition: Partition) -> list[int]:
    """Return the stages that do not fit, the fullest first."""
    peaks = problem.peaks_of(partition.cuts, partition.fits)
    order = sorted(range(len(peaks)), key=lambda stage: -peaks[stage])
    return [stage for stage in order if peaks[stage] > problem.limit_bytes]


def _shares(problem: Problem, partition: Partition, stage: int) -> list[tuple[int, Load]]:
    """Return the positions of a stage that is too full, each with its share of it."""
    fits, copies = partition.fits, problem.copies
    left = [problem.left(*ends) for ends in pairwise(partition.cuts)]
    moment = copies.weighed(stage, np.array([way.kept for way in fits]), np.array(left)).argmax()
    halves = copies.left[stage][moment]
    row = copies.live[stage][moment] - halves
    held = []
    for position, ends in enumerate(pairwise(partition.cuts)):
        beside = problem.beside(position, *ends) + fits[position].transient
        kept = float(row[position]) * fits[position].kept + float(halves[position]) * left[position]
        held.append(kept + (copies.owners[position] == stage) * beside)
    part = problem.limit_bytes / sum(held)
    return [
        (
            position,
            Load(
                max(1, int(row[position])),
                float(np.floor(nbytes * part)),
                copies.owners[position] == stage,
                int(halves[position]),
            ),
        )
        for position, nbytes in enumerate(held)
        if nbytes
    ]
