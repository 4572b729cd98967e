"""Which storages to keep so that a stage can be computed again piece by piece (Chen et al., 2016)."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.ranges import Saved

__all__ = ["checkpoints"]

#: Each size of pieces that is considered is that part of the one before.
_FINER = 0.8


class _Inside(NamedTuple):
    """The storages that a stage's nodes make, as columns: by and up to which node, and whether it is saved."""

    ids: list[int]
    nbytes: Numbers
    begins: Numbers
    ends: Numbers
    is_saved: Numbers

    def crossing(self, borders: list[int]) -> Numbers:
        """Which are made before and read behind a border; a border is the last node of a piece."""
        at = np.array(borders, np.int64)
        found: Numbers = np.searchsorted(at, self.begins, "left") < np.searchsorted(at, self.ends, "left")
        return found


def checkpoints(saved: Saved, copies: int, free_bytes: float) -> frozenset[int]:
    """The storages that cross the borders of pieces with which least memory is needed.

    A piece is whole while it is backwarded, and `copies` micro-batches keep what crosses, but for `free_bytes` of it
    that can be swapped for nothing: that is there for one of them. Borders are where little crosses, so that layers are
    among the pieces.
    """
    inside = _inside(saved)
    length = saved.stop - saved.start
    weights = inside.nbytes * np.where(inside.is_saved, 1, copies)
    made, gone = (np.bincount(at, weights, length) for at in (inside.begins, inside.ends))
    crossing = np.cumsum(made - gone)
    producers = [max(0, saved.graph.producer[one] - saved.start) for one in saved.ids.tolist()]
    saves: Numbers = np.bincount(producers, saved.nbytes, length)
    upto = np.cumsum(saves)
    best, least = list[int](), np.inf
    most = float(upto[-1])
    while most > saves.max():
        borders = _borders(crossing, upto, most)
        there = inside.crossing(borders)
        kept = float(inside.nbytes[there & ~inside.is_saved].sum())
        crosses = float(inside.nbytes[there & inside.is_saved].sum())
        swapped = min(crosses, free_bytes)
        kept += crosses - swapped
        ends = [0.0, *upto[borders].tolist(), float(upto[-1])]
        needs = copies * kept + swapped + max(high - low for low, high in pairwise(ends))
        if needs < least:
            best, least = borders, needs
        most *= _FINER
    return frozenset(one for one, crosses in zip(inside.ids, inside.crossing(best).tolist(), strict=True) if crosses)


def _inside(saved: Saved) -> _Inside:
    graph, start, stop = saved.graph, saved.start, saved.stop
    ids = [one for node in range(start, stop) for one in graph.makes[node] if graph.users[one]]
    return _Inside(
        ids,
        np.array([graph.nbytes[one] for one in ids], np.float64),
        np.array([graph.producer[one] - start for one in ids], np.int64),
        np.array([max(graph.producer[one], min(graph.users[one][-1], stop - 1)) - start for one in ids], np.int64),
        np.isin(np.array(ids, np.int64), saved.ids),
    )


def _borders(crossing: Numbers, upto: Numbers, most: float) -> list[int]:
    """The last nodes of pieces that save at most so much, where they can be cut so; the last of those as quiet."""
    found, base = list[int](), 0.0
    while upto[-1] - base > most:
        low, high = np.searchsorted(upto, [base + most / 4, base + most], "right").tolist()
        low = max(low, found[-1] + 1 if found else 0)
        if low >= len(upto) - 1:
            break
        high = max(high, low + 1)
        found.append(high - 1 - int(crossing[low:high][::-1].argmin()))
        base = float(upto[found[-1]])
    return found
