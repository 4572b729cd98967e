"""Boundaries moved so that the longest stage becomes shorter, where there is no time to find the best partition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

import numpy as np

from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.filling import Found, quiet_places
from evenpipe.partition.search.problem import Cell, Problem

__all__ = ["nudged"]

#: How much of the time that a stage takes more than its neighbour a move hands over; less, where that is no better.
_PARTS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)


def nudged(problem: Problem, found: Found, most_weighed: float = inf) -> Found:
    """`found`, or what moving boundaries one at a time makes of it, to quiet places, until that shortens nothing.

    Whatever takes longest hands nodes over to the neighbour with which the longer of the two becomes shorter. Ends when
    `most_weighed` has been (see `Problem.weighed`).
    """
    quiet, cuts = quiet_places(problem), list(found.cuts)
    cells = [cell for k, ends in enumerate(pairwise(cuts)) if (cell := problem.cell(k, *ends)) is not None]
    assert len(cells) == len(cuts) - 1, "what was found fits"
    parts = list(_PARTS)
    while parts and problem.weighed < most_weighed:
        longest = max(range(len(cells)), key=lambda k: cells[k].ms)
        moves = _moves(problem, quiet, cuts, cells, longest, parts[0])
        best = min(moves, key=lambda move: max(cell.ms for cell in move[2]), default=None)
        if best is None:
            parts.pop(0)
        else:
            boundary, cuts[boundary], cells[boundary - 1 : boundary + 1] = best
    return found._replace(cuts=tuple(cuts), ms=max(cell.ms for cell in cells), fits=tuple(cell.fit for cell in cells))


def _moves(
    problem: Problem, quiet: Numbers, cuts: list[int], cells: list[Cell], longest: int, part: float
) -> Iterator[tuple[int, int, tuple[Cell, Cell]]]:
    """Boundaries of the longest, where each could lie, and how both sides of it then fit, where both are shorter."""
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
