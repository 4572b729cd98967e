"""Partitions that fit, found soon: stages filled as far as they can be made to fit, and boundaries moved after that."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.dawnpiper.capuchin import Fit
from evenpipe.partition.dawnpiper.problem import Cell, Problem

__all__ = ["Partition", "filled_reach", "nudged", "partition_of", "seed"]

#: Of a position's mean time, how far around a quiet place nothing sends less.
_QUIET = 1 / 16
#: How many times the median of quiet places a quiet place may send.
_MUCH = 4
#: Limits of a stage's time, as parts of the least conceivable, with which stages are filled for something that fits.
_SEEDS = (1.1, 1.3, 1.7, 2.5)
#: How much of the time that a stage takes more than its neighbour a move hands over; less, where that is no better.
_PARTS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)


class Partition(NamedTuple):
    """Boundaries of all positions, from 0 to the last; the longest one's ms; a lower bound of all; and how each fits.

    After a search that is not cut short, the two times differ by less than 0.1 %.
    """

    cuts: tuple[int, ...]
    ms: float
    optimum_ms: float
    fits: tuple[Fit, ...]


def partition_of(problem: Problem, cuts: Sequence[int], optimum_ms: float) -> Partition | None:
    """Return the partition with these cuts; None if some of it does not fit."""
    cells = problem.cells(cuts)
    if cells is None:
        return None
    return Partition(tuple(cuts), max(cell.ms for cell in cells), optimum_ms, tuple(cell.fit for cell in cells))


def seed(problem: Problem, least_ms: float) -> Partition | None:
    """Return a partition that fits, of stages filled from either end at quiet places; None: none is found.

    No stage takes more than one of `_SEEDS` times `least_ms`, which is its only lower bound.
    """
    quiet = _quiet_places(problem)[1:-1]
    for width in _SEEDS:
        for backwards in (False, True):
            cuts = _filled(problem, quiet, least_ms * width, backwards)
            partition = partition_of(problem, cuts, least_ms) if cuts is not None else None
            if partition is not None:
                return partition
    return None


def _filled(problem: Problem, quiet: Numbers, most_ms: float, backwards: bool) -> list[int] | None:
    """Return all boundaries, with stages filled one after the other, so that the last one gets the rest."""
    count, last, upto = problem.copies.positions, problem.costs.last, problem.costs.upto_ms
    cuts = [last if backwards else 0]
    for position in reversed(range(1, count)) if backwards else range(count - 1):
        begin = cuts[-1]
        near = quiet[(upto[quiet] >= upto[begin] - most_ms) & (upto[quiet] <= upto[begin] + most_ms)]
        ends = (near[near < begin][::-1] if backwards else near[near > begin]).tolist()
        fitting = _fitting(problem, position, begin, ends)
        if not fitting:
            return None
        cuts.append(ends[fitting - 1])
    return [0, *cuts[::-1]] if backwards else [*cuts, last]


def filled_reach(problem: Problem, reach: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Return `reach` with stages filled as far as they can be made to fit; None: by (6) of `search` the model does not.

    Each begins at a quiet place that its cut is not behind, and ends before the first one that is too far.
    """
    count, last, quiet = problem.copies.positions, problem.costs.last, _quiet_places(problem)
    right, left, begin, end = [0], [last], 0, last
    for position in range(count):
        stop = reach[position + 1][1]
        ends = quiet[(quiet > begin) & (quiet <= stop)].tolist()
        fitting = _fitting(problem, position, begin, ends)
        right.append(max(right[-1], ends[fitting] - 1 if fitting < len(ends) else stop))
        begin = int(quiet[np.searchsorted(quiet, right[-1])])
    if right[-1] < last:
        return None
    for position in reversed(range(count)):
        first = reach[position][0]
        begins = quiet[(quiet < end) & (quiet >= first)][::-1].tolist()
        fitting = _fitting(problem, position, end, begins)
        left.append(min(left[-1], begins[fitting] + 1 if fitting < len(begins) else first))
        end = int(quiet[np.searchsorted(quiet, left[-1], "right") - 1])
    if left[-1] > 0:
        return None
    spans = zip(reversed(left), right, strict=True)
    return [(max(low, first), min(high, stop)) for (low, high), (first, stop) in zip(spans, reach, strict=True)]


def _quiet_places(problem: Problem) -> Numbers:
    """Return the boundaries that send no more than any nearby, nor much more than most, and both ends.

    Elsewhere a range may not fit for its message alone, as between a model's logits and its loss.
    """
    sent, last = problem.costs.cut_bytes, problem.costs.last
    inner = problem.costs.quiet(problem.costs.upto_ms[-1] * _QUIET / problem.copies.positions)
    inner = inner[sent[inner] <= _MUCH * np.median(sent[inner])] if len(inner) else inner
    return np.array([0, *inner.tolist(), last])


def _fitting(problem: Problem, position: int, fixed: int, others: Sequence[int]) -> int:
    """Return how many of the ranges between `fixed` and others fit, each in the next one.

    The longest is weighed first: the model's end sends nothing.
    """

    def misfits(number: int) -> bool:
        return problem.cell(position, *sorted((fixed, others[number]))) is None

    if not others or not misfits(len(others) - 1):
        return len(others)
    return bisect_left(range(len(others) - 1), True, key=misfits)


def nudged(problem: Problem, partition: Partition, most_weighed: float = inf) -> Partition:
    """Return the partition with boundaries moved to quiet places, one at a time, until that shortens nothing.

    The longest position hands nodes over to the neighbour with which the longer of the two becomes shorter. Ends when
    `most_weighed` ranges have been weighed (see `Problem.weighed`).
    """
    quiet, cuts, cells = _quiet_places(problem), list(partition.cuts), problem.cells(partition.cuts)
    assert cells is not None, "the partition fits"
    parts = list(_PARTS)
    while parts and problem.weighed < most_weighed:
        longest = max(range(len(cells)), key=lambda k: cells[k].ms)
        moves = _moves(problem, quiet, cuts, cells, longest, parts[0])
        best = min(moves, key=lambda move: max(cell.ms for cell in move[2]), default=None)
        if best is None:
            parts.pop(0)
        else:
            boundary, cuts[boundary], cells[boundary - 1 : boundary + 1] = best
    return Partition(
        tuple(cuts), max(cell.ms for cell in cells), partition.optimum_ms, tuple(cell.fit for cell in cells)
    )


def _moves(
    problem: Problem, quiet: Numbers, cuts: list[int], cells: list[Cell], longest: int, part: float
) -> Iterator[tuple[int, int, tuple[Cell, Cell]]]:
    """Yield a boundary of the longest, a place for it, and how both sides then fit, where both become shorter."""
    upto, ms = problem.costs.upto_ms, cells[longest].ms
    for boundary, neighbour, sign in ((longest, longest - 1, 1), (longest + 1, longest + 1, -1)):
        if not 0 <= neighbour < len(cells):
            continue
        to_ms = upto[cuts[boundary]] + sign * part * (ms - cells[neighbour].ms)
        at = int(quiet[np.abs(upto[quiet] - to_ms).argmin()])
        if at == cuts[boundary] or not cuts[boundary - 1] < at < cuts[boundary + 1]:
            continue
        before = problem.cell(boundary - 1, cuts[boundary - 1], at)
        behind = problem.cell(boundary, at, cuts[boundary + 1]) if before is not None and before.ms < ms else None
        if before is not None and behind is not None and behind.ms < ms:
            yield boundary, at, (before, behind)
