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
_MOST_SEARCHES = 60


def best_partition(problem: Problem, most_weighed: float = inf) -> Found | None:
    """The best partition whose stages fit by the schedule's walk; None: none is known. Branch and bound.

    The exact search gives every position all of a stage's memory, so what it finds is at least as fast as what fits. If
    a stage then holds f1 + f2 + … > M of its positions, then in whatever fits some position k of these has at most its
    part f_k·M ÷ Σf: were all above, they would be more than M. So one problem for each k, with that cap, together
    leave nothing out. A further one, with all of those caps, is no part of the proof: it finds something soon.
    `most_weighed`: see `search`.
    """
    found = search(problem, most_weighed)
    if found is None or problem.copies.separable:
        return found
    number = count()
    best: Found | None = None
    heap = [(found.optimum_ms, next(number), found, problem, True)]
    for _ in range(_MOST_SEARCHES):
        if not heap or (best is not None and heap[0][0] >= best.ms):
            break
        _, _, found, part, covers = heappop(heap)
        shares = _shares(part, found)
        if not shares:
            best = found if best is None or found.ms < best.ms else best
            continue
        all_capped = part
        for position, cap in shares:
            all_capped = all_capped.capped(position, cap)
        branches = [(part.capped(position, cap), covers) for position, cap in shares]
        for branch, counts in [*branches, (all_capped, False)]:
            inner = search(branch, most_weighed)
            if inner is not None:
                heappush(heap, (inner.optimum_ms, next(number), inner, branch, counts))
    if best is None:
        return None
    open_ms = [bound for bound, _, _, _, covers in heap if covers]
    return best._replace(optimum_ms=min([best.optimum_ms, *open_ms]))


def _shares(problem: Problem, found: Found) -> list[tuple[int, Cap]]:
    """Of the fullest stage, if it is too full, what each of its positions could have of it at most, as a cap."""
    cuts, fits = found.cuts, found.fits
    peaks = problem.peaks_of(cuts, fits)
    stage = int(np.argmax(peaks))
    if peaks[stage] <= problem.limit_bytes:
        return []
    rows = problem.copies.live[stage]
    kept = np.array([one.kept for one in fits])
    row = rows[(rows @ kept).argmax()]
    shares = []
    for position, ends in enumerate(pairwise(cuts)):
        own = problem.copies.owners[position] == stage
        held = float(row[position]) * fits[position].kept
        held += own * (problem.beside(position, *ends) + fits[position].transient)
        if held:
            most = held * problem.limit_bytes / peaks[stage]
            shares.append((position, Cap(max(1, int(row[position])), float(np.floor(most)), own)))
    return shares
