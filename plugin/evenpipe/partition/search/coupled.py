"""The exact search where stages hold parts of several positions: their own chunks, or a partner's micro-batches."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf

import numpy as np

from evenpipe.partition.search.exact import Found, search
from evenpipe.partition.search.problem import Cap, Problem

__all__ = ["best_partition"]

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
