"""Which storages to keep so that a stage can be computed again piece by piece (Chen et al., 2016)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.ranges import Saved

__all__ = ["Division"]

#: Each size of pieces that is considered is that part of the one before.
_FINER = 0.75
#: So many sizes are tried, where the estimate says that they could be small enough.
_MOST = 6


class _Inside(NamedTuple):
    """The storages that a stage's nodes make, as columns: by and up to which node, and whether it is saved."""

    ids: Numbers
    nbytes: Numbers
    begins: Numbers
    ends: Numbers
    is_saved: Numbers

    def crossing(self, borders: list[int]) -> Numbers:
        """Which are made before and read behind a border; a border is the last node of a piece."""
        at = np.array(borders, np.int64)
        found: Numbers = np.searchsorted(at, self.begins, "left") < np.searchsorted(at, self.ends, "left")
        return found


class Pieces(NamedTuple):
    """Borders, and bytes: of the largest piece, of what crosses and is not saved otherwise, and of what is."""

    borders: list[int]
    largest: float
    unsaved: float
    crosses: float


class Division:
    """A stage in pieces of any size, of which `copies` micro-batches keep what crosses the borders.

    Borders are where little crosses; or they are those of the model's layers.
    """

    def __init__(self, saved: Saved, copies: int) -> None:
        self._copies = copies
        self._inside = inside = _inside(saved)
        length = saved.stop - saved.start
        weights = inside.nbytes * np.where(inside.is_saved, 1, copies)
        made, gone = (np.bincount(at, weights, length) for at in (inside.begins, inside.ends))
        crossing = np.cumsum(made - gone).tolist()
        saves: Numbers = np.bincount(np.maximum(0, saved.producers - saved.start), saved.nbytes, length)
        upto = np.cumsum(saves).tolist()
        ends = [end - saved.start for end in saved.graph.layer_ends if saved.start <= end < saved.stop - 1]
        self._sizes = [self._pieces(ends, upto)]
        most, largest = upto[-1], float(saves.max())
        while most > largest:
            self._sizes.append(self._pieces(_borders(crossing, upto, most), upto))
            most *= _FINER

    def _pieces(self, borders: list[int], upto: list[float]) -> Pieces:
        inside, there = self._inside, self._inside.crossing(borders)
        unsaved, crosses = (float(inside.nbytes[there & of].sum()) for of in (~inside.is_saved, inside.is_saved))
        ends = [0.0, *(upto[border] for border in borders), upto[-1]]
        return Pieces(borders, max(high - low for low, high in pairwise(ends)), unsaved, crosses)

    def checkpoints(self, free_bytes: float, budget: float) -> Iterator[frozenset[int]]:
        """The storages that cross the borders: first where least memory is needed, and then where it may be enough.

        A piece is whole while it is backwarded. Of what crosses, `free_bytes` can be swapped for nothing: that is there
        for one micro-batch, or for none, if it leaves and comes back soon enough; both estimates have a best.
        """

        def needs(one: Pieces, there: bool) -> float:
            swapped = min(one.crosses, free_bytes)
            return self._copies * (one.unsaved + one.crosses - swapped) + there * swapped + one.largest

        chances = [one for one in self._sizes if needs(one, False) <= budget]
        if chances:
            first = [min(chances, key=lambda one: needs(one, there)) for there in (True, False)]
            known = set[frozenset[int]]()
            for one in [*first, *sorted(chances, key=lambda one: needs(one, True))]:
                crossing = frozenset(self._inside.ids[self._inside.crossing(one.borders)].tolist())
                if crossing not in known and len(known) < _MOST:
                    known.add(crossing)
                    yield crossing


def _inside(saved: Saved) -> _Inside:
    nbytes, producer, last_user = saved.graph.columns
    start, stop = saved.start, saved.stop
    ids = np.flatnonzero((producer >= start) & (producer < stop) & (last_user >= 0))
    begins = producer[ids]
    ends = np.maximum(begins, np.minimum(last_user[ids], stop - 1))
    return _Inside(ids, nbytes[ids].astype(np.float64), begins - start, ends - start, saved.is_here[ids])


def _borders(crossing: list[float], upto: list[float], most: float) -> list[int]:
    """The last nodes of pieces that save at most so much, where they can be cut so; the last of those as quiet."""
    found, base = list[int](), 0.0
    while upto[-1] - base > most:
        low = max(bisect_right(upto, base + most / 4), found[-1] + 1 if found else 0)
        if low >= len(upto) - 1:
            break
        high = max(bisect_right(upto, base + most), low + 1)
        quietest = min(crossing[low:high])
        border = high - 1
        while crossing[border] > quietest:
            border -= 1
        found.append(border)
        base = upto[border]
    return found
