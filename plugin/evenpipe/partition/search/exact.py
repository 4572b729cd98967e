"""The partition whose longest stage is shortest, found by dynamic programming over windows of cuts, with proof."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.memory import Fit
from evenpipe.partition.search.problem import Problem

__all__ = ["Found", "search"]

#: How far above the least conceivable time stages may be in each attempt; the last leaves none out.
_WIDTHS = (1.01, 1.04, 1.12, 1.3, 1.7, 2.5, np.inf)
#: A partition as fast as the best but for half of this part ends the search, and of those as fast as that one but for
#: the other half, the one that sends least over its cuts is taken (B.2).
_AS_FAST = 5e-4


class Found(NamedTuple):
    """Boundaries of all positions, from 0 to the last; the longest one's ms; what none can be below; and how each fits.

    The two times differ by 0.05 % at most, which is given for small messages and a short search.
    """

    cuts: tuple[int, ...]
    ms: float
    optimum_ms: float
    fits: tuple[Fit, ...]


def search(problem: Problem) -> Found | None:
    """The best partition; None: none fits.

    Why what is left out cannot matter. (1) Some stage takes at least the mean, and one with the longest piece between
    two boundaries at least that; so attempts begin there. (2) If no stage takes more than w, then k stages take at most
    k·w, so the cut behind stage k lies where at most k·w is before it, and at most (n − k)·w behind. (3) A range that
    fails `Problem.may_fit` fails it with more nodes too, so filling stages from the left as far as they go gives the
    last place of each cut, and from the right the first. (4) An attempt finds the best of the partitions in which no
    stage takes more than w: if there is any, it is the best of all. (5) `Problem.lower_ms` is never more than a range
    takes. So no path takes less than the best one by lower bounds, of which the ranges are weighed in turn, until one
    that has been weighed takes no more.
    """
    reach = _reach(problem)
    if reach is None:
        return None
    upto = problem.costs.upto_ms
    least = max(upto[-1] / problem.copies.positions, float(np.diff(upto).max()))
    for width in _WIDTHS:
        windows = _windows(problem, reach, least * width if np.isfinite(width) else np.inf)
        found = _best(problem, windows, least * width) if all(map(len, windows)) else None
        if found is not None:
            return found
    return None


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
        windows.append(np.arange(low, high + 1))
    return windows


def _best(problem: Problem, windows: list[Numbers], most_ms: float) -> Found | None:
    """The best with boundaries in these windows and no stage above `most_ms`: a shortest path by longest edge."""
    blocks, known = [], []
    for position, (firsts, lasts) in enumerate(pairwise(windows)):
        lower, exact = problem.lower_ms(position, firsts, lasts)
        lower[lower > most_ms * (1 + 1e-9)] = np.inf
        blocks.append(lower)
        known.append(exact)
    best_ms = np.inf
    while True:
        path, ms = _shortest(blocks, np.maximum)
        if not np.isfinite(ms):
            return None
        open_cells = [k for k, at in enumerate(pairwise(path)) if not known[k][at]]
        for k in open_cells:
            at = (path[k], path[k + 1])
            cell = problem.cell(k, int(windows[k][at[0]]), int(windows[k + 1][at[1]]))
            # Bounds are sums in another order than weighed ones, and may differ in the last digit.
            blocks[k][at] = np.inf if cell is None or cell.ms > most_ms * (1 + 1e-9) else cell.ms
            known[k][at] = True
        best_ms = min(best_ms, float(max(block[at] for block, at in zip(blocks, pairwise(path), strict=True))))
        if best_ms <= ms * (1 + _AS_FAST / 2):
            break
    volume = [
        np.where(exact & (block <= best_ms * (1 + _AS_FAST / 2)), problem.costs.cut_bytes[lasts][None, :], np.inf)
        for block, exact, lasts in zip(blocks, known, windows[1:], strict=True)
    ]
    path, _ = _shortest(volume, np.add)
    cuts = [int(window[at]) for window, at in zip(windows, path, strict=True)]
    cells = [cell for k, ends in enumerate(pairwise(cuts)) if (cell := problem.cell(k, *ends)) is not None]
    assert len(cells) == len(windows) - 1, "only ranges that fit have finite times"
    return Found(tuple(cuts), max(cell.ms for cell in cells), float(ms), tuple(cell.fit for cell in cells))


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
