"""The partition whose longest stage is shortest, found by dynamic programming over windows of cuts, with proof."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.dawnpiper.problem import Cap, Problem
from evenpipe.partition.search.filling import Found, filled_reach, nudged, seed

__all__ = ["Found", "best_partition", "search"]

#: How far above the least conceivable time stages may be in each attempt; the last leaves none out.
_WIDTHS = (1.01, 1.04, 1.12, 1.3, 1.7, 2.5, inf)
#: How many paths are weighed for a good one before the best is sought.
_GUESSES = 12
#: How many ranges beyond what was asked for are weighed if none makes up a partition yet.
_PATIENCE = 30
#: How many are weighed before it is asked whether anything fits at all.
_AT_FIRST = 20
#: How many are weighed at the end to move boundaries of what is not proven to be the best.
_AFTERWARDS = 10
#: Places of a cut among which one is sought where there is no time for a proof.
_PLACES = 96
#: A partition that is above what none can be below by no more than this part ends the search.
_NEAR = 8e-4
#: Of partitions as fast as that one but for this part, the one that sends least over its cuts is taken (B.2).
_AS_FAST = 1.5e-4


def search(problem: Problem, most_weighed: float = inf) -> Found | None:
    """The best partition; None: none fits.

    When `most_weighed` ranges have been weighed, the best partition of these is taken, and `optimum_ms` may be
    further below it; a little later it is given up if there is none, so that one which hardly fits may be missed.

    Why what is left out cannot matter. (1) Some stage takes at least the mean, and one with the longest piece between
    two boundaries at least that; so attempts begin there. (2) If no stage takes more than w, then k stages take at most
    k·w, so the cut behind stage k lies where at most k·w is before it, and at most (n − k)·w behind. (3) A range that
    fails `Problem.may_fit` fails it with more nodes too, so filling stages from the left as far as they go gives the
    last place of each cut, and from the right the first. (4) An attempt finds the best of the partitions in which no
    stage takes more than w: if there is any, it is the best of all. One that takes more makes the next attempt the
    last, with w as long as it takes. (5) `Problem.lower_ms` is never more than a range takes. So no path takes less
    than the best one by lower bounds, of which the ranges are weighed in turn, until one that has been takes no more.
    (6) Taken as given: what cannot be made to fit, with all that saves anything recomputed or swapped, cannot be with
    more nodes and messages that are no smaller.
    """
    reach = _reach(problem)
    found = _by_widths(problem, reach, most_weighed) if reach is not None else None
    if found is None or most_weighed == inf or found.ms <= found.optimum_ms * (1 + _NEAR):
        return found
    return nudged(problem, found, problem.weighed + _AFTERWARDS)


def _by_widths(problem: Problem, reach: list[tuple[int, int]], most_weighed: float) -> Found | None:
    """`search`, by attempts of growing width."""
    least = problem.least_ms
    best: Found | None = None
    narrowed = False
    filled = problem.optimize == "none"
    for width in _WIDTHS:
        most_ms = best.ms if best is not None else least * width
        windows = _windows(problem, reach, most_ms)
        # What is not to be proven is sought among some of the places, where there are many.
        thinned = problem.optimize != "none" and most_weighed < inf and max(map(len, windows)) > _PLACES
        if thinned:
            windows = [_thinned(problem, window) for window in windows]
        gives_up = most_weighed + _PATIENCE if filled else problem.weighed + _AT_FIRST
        found = _Paths(problem, windows, most_ms).best(most_weighed, gives_up) if all(map(len, windows)) else None
        if found is not None:
            if thinned or narrowed:
                found = found._replace(optimum_ms=least)
            if best is not None and best.ms < found.ms:
                return best._replace(optimum_ms=found.optimum_ms)
            if best is not None or found.ms <= most_ms * (1 + 1e-9) or problem.weighed >= most_weighed:
                return found
            best = found
        elif best is not None:
            return best
        elif not filled:
            # Nothing is near the mean: perhaps nothing fits, which is known soonest by filling stages in earnest.
            before, filled = problem.weighed, True
            best = seed(problem, least)
            if best is not None and before >= most_weighed:
                return best
            if best is None:
                nearer = filled_reach(problem, reach)
                if nearer is None and most_weighed == inf:
                    return None
                # Messages are not compared there, as (6) wants it: better ones may be left out.
                reach, narrowed = nearer or reach, nearer is not None
            most_weighed += problem.weighed - before
            if best is not None and most_weighed < inf:
                best = nudged(problem, best, most_weighed)
    return best


def _reach(problem: Problem) -> list[tuple[int, int]] | None:
    """Per boundary of positions, the first and the last place that it can have by (3), with a cut for each.

    Where the piece behind a filled position is too much for the next one, that one ends before it: at most there.
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
    """Per boundary of positions, the places that it can have, by (2) and (3)."""
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
    """Of each so many neighbouring places the one that sends least."""
    parts = np.array_split(window, min(len(window), _PLACES)) if len(window) else []
    return np.array([part[problem.costs.cut_bytes[part].argmin()] for part in parts])


class _Paths:
    """Boundaries in windows, as layers, and between them what ranges take: a lower bound, or known."""

    def __init__(self, problem: Problem, windows: list[Numbers], most_ms: float) -> None:
        self.problem, self.windows, self.most_ms = problem, windows, most_ms
        self.ms, self.known = list[Numbers](), list[Numbers]()
        for position, (firsts, lasts) in enumerate(pairwise(windows)):
            lower, exact = problem.lower_ms(position, firsts, lasts)
            lower[lower > most_ms * (1 + 1e-9)] = inf
            self.ms.append(lower)
            self.known.append(exact)
        self.best_ms = inf

    def best(self, most_weighed: float, gives_up: float) -> Found | None:
        """The path of which the longest range is shortest, by the lower bounds at first; None: there is none.

        When `gives_up` ranges have been weighed in all, and none fits, it is given up.
        One that is good is guessed before: by bounds that are as far off as they were for ranges of the same position.
        Its ranges may take more than the attempt is for; those of better ones do not.
        """
        factors = np.ones(len(self.ms))
        for _ in range(_GUESSES):
            guessed = [np.where(known, ms, ms * by) for ms, known, by in zip(self.ms, self.known, factors, strict=True)]
            path, ms = _shortest(guessed, np.maximum)
            if ms == inf or not self._weigh(path, factors) or self._enough(most_weighed):
                break
            if self.best_ms == inf and self.problem.weighed >= gives_up:
                break
        while True:
            path, ms = _shortest(self.ms, np.maximum)
            if self.best_ms == inf and (ms == inf or self.problem.weighed >= gives_up):
                return None
            if self.best_ms <= ms * (1 + _NEAR) or self._enough(most_weighed):
                return self._quietest(min(ms, self.most_ms))
            self._weigh(path, factors)

    def _enough(self, most_weighed: float) -> bool:
        return self.best_ms < inf and self.problem.weighed >= most_weighed

    def _weigh(self, path: list[int], factors: Numbers) -> bool:
        """Have the ranges of a path known; whether any was not."""
        open_ranges = [k for k, at in enumerate(pairwise(path)) if not self.known[k][at]]
        for k in open_ranges:
            at = (path[k], path[k + 1])
            cell = self.problem.cell(k, int(self.windows[k][at[0]]), int(self.windows[k + 1][at[1]]))
            if cell is not None and 0 < self.ms[k][at] < inf:
                factors[k] = max(1.0, cell.ms / self.ms[k][at])
            self.ms[k][at] = inf if cell is None else cell.ms
            self.known[k][at] = True
            if cell is None:
                # By (6) no range around it fits either; what is known to fit stays.
                around = slice(at[0] + 1), slice(at[1], None)
                messages = self.problem.costs.messages(self.windows[k][around[0]], self.windows[k + 1][around[1]])
                gone = ~self.known[k][around] & (messages >= messages[-1, 0])
                self.ms[k][around][gone] = inf
                self.known[k][around] |= gone
        longest = max(float(ms[at]) for ms, at in zip(self.ms, pairwise(path), strict=True))
        self.best_ms = min(self.best_ms, longest)
        return bool(open_ranges)

    def _quietest(self, optimum_ms: float) -> Found:
        """Of the known paths as good as the best, the one that sends least."""
        volume = [
            np.where(known & (ms <= self.best_ms * (1 + _AS_FAST)), self.problem.costs.cut_bytes[lasts][None, :], inf)
            for ms, known, lasts in zip(self.ms, self.known, self.windows[1:], strict=True)
        ]
        path, _ = _shortest(volume, np.add)
        cuts = [int(window[at]) for window, at in zip(self.windows, path, strict=True)]
        cells = [cell for k, ends in enumerate(pairwise(cuts)) if (cell := self.problem.cell(k, *ends)) is not None]
        assert len(cells) == len(self.ms), "only ranges that fit have finite times"
        return Found(tuple(cuts), max(cell.ms for cell in cells), optimum_ms, tuple(cell.fit for cell in cells))


def _shortest(blocks: list[Numbers], joined: np.ufunc) -> tuple[list[int], float]:
    """Through layers of nodes with `blocks` of edges between, the path of which what `joined` makes of it is least."""
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


#: How many times the exact search runs at most; what it then has is the best known, beside a bound for what there is.
_MOST_SEARCHES = 40
#: How many of these may go into finding something that fits, before the best is sought.
_MOST_DIVES = 16


def best_partition(problem: Problem, most_weighed: float = inf) -> Found | None:
    """The best partition whose stages fit by the schedule's walk; None: none is known. Branch and bound.

    The exact search gives every position all of a stage's memory, so what it finds is at least as fast as what fits. If
    a stage then holds f1 + f2 + … > M of its positions, then in whatever fits some position k of these has at most its
    part f_k·M ÷ Σf: were all above, they would be more than M. So one problem for each k, with that cap, together
    leave nothing out. `most_weighed`: see `search`.
    """
    found = search(problem, most_weighed)
    if found is None or problem.copies.separable:
        return found
    number = count()
    best = _dive(problem, found, most_weighed)
    bounds = list[float]()
    heap = [(found.optimum_ms, next(number), found, problem)]
    for _ in range(_MOST_SEARCHES):
        if not heap or (best is not None and heap[0][0] >= best.ms):
            break
        bound_ms, _, found, part = heappop(heap)
        too_full = _too_full(part, found)
        if not too_full:
            bounds.append(bound_ms)
            best = found if best is None or found.ms < best.ms else best
            continue
        for position, cap in _shares(part, found, too_full[0]):
            branch = part.capped(position, cap)
            inner = search(branch, most_weighed)
            if inner is not None:
                heappush(heap, (inner.optimum_ms, next(number), inner, branch))
            elif problem.optimize != "none" and most_weighed < inf:
                bounds.append(bound_ms)  # given up, perhaps: what it has is no better than what it is a branch of
    if best is None:
        return None
    return best._replace(optimum_ms=min([best.ms, *bounds, *(bound_ms for bound_ms, *_ in heap)]))


def _dive(problem: Problem, found: Found, most_weighed: float) -> Found | None:
    """Something that fits, soon: every position of a stage that is too full is held to its part of it, again and again.

    Whether there is nothing else, this does not tell.
    """
    for _ in range(_MOST_DIVES):
        too_full = _too_full(problem, found)
        if not too_full:
            return found
        for stage in too_full:
            for position, cap in _shares(problem, found, stage):
                problem = problem.capped(position, cap)
        nearer = search(problem, most_weighed)
        if nearer is None:
            return None
        found = nearer
    return None


def _too_full(problem: Problem, found: Found) -> list[int]:
    """The stages that do not fit, the fullest first."""
    peaks = problem.peaks_of(found.cuts, found.fits)
    order = sorted(range(len(peaks)), key=lambda stage: -peaks[stage])
    return [stage for stage in order if peaks[stage] > problem.limit_bytes]


def _shares(problem: Problem, found: Found, stage: int) -> list[tuple[int, Cap]]:
    """Of a stage that is too full, what each of its positions could have of it, as a cap."""
    cuts, fits = found.cuts, found.fits
    rows = problem.copies.live[stage]
    row = rows[(rows @ np.array([one.kept for one in fits])).argmax()]
    held = []
    for position, ends in enumerate(pairwise(cuts)):
        own = problem.copies.owners[position] == stage
        beside = problem.beside(position, *ends) + fits[position].transient
        held.append(float(row[position]) * fits[position].kept + own * beside)
    part = problem.limit_bytes / sum(held)
    return [
        (
            position,
            Cap(max(1, int(row[position])), float(np.floor(nbytes * part)), problem.copies.owners[position] == stage),
        )
        for position, nbytes in enumerate(held)
        if nbytes
    ]
