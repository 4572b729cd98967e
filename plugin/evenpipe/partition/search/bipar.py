"""Binary pipeline partitioning (DawnPiper §4.2, Algorithm 1); comments give the lines of the paper."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from evenpipe.partition.search.balance import Balance
from evenpipe.partition.search.communication import quiet
from evenpipe.partition.search.problem import Problem

__all__ = ["Binary", "Part", "bipar"]


class Part(NamedTuple):
    """A part of the model, cut: boundaries from its first to its last, and the ms of its longest position."""

    ms: float
    cuts: tuple[int, ...]


class Binary(NamedTuple):
    """What Algorithm 1 finds, None if nothing fits; and how many different nodes it tried to cut behind (φ)."""

    part: Part | None
    nodes_tried: int


def bipar(problem: Problem, floor_ms: float = 0.0, ceiling_ms: float = inf) -> Binary:
    """BiPar(N, 1, ℓ). Positions count from 0 here; a part that comes up again is cut as before.

    `floor_ms`: no partition is known to be below it, so that a part which is as fast need be no faster. `ceiling_ms`:
    what must take longer, by compute alone, is not weighed; there may be nothing else.
    """
    search = _BiPar(problem, floor_ms, ceiling_ms)
    part = search.bipar(0, problem.costs.last, 0, problem.copies.positions - 1)
    return Binary(part, len(search.tried))


class _BiPar:
    def __init__(self, problem: Problem, floor_ms: float, ceiling_ms: float) -> None:
        self.problem, self.floor_ms, self.ceiling_ms = problem, floor_ms, ceiling_ms
        self.balance = Balance(problem)
        self.quiet = quiet(problem.costs, problem.copies.positions)
        self.tried = set[int]()
        self._known: dict[tuple[int, int, int, int], Part | None] = {}

    def adjacent_partition(self, first: int, last: int, sid: int) -> Part | None:  # 1
        compute_cut, memory_cut = self._balanced(first, last, sid, sid, sid + 1)  # 2
        at_once = self._pair(first, compute_cut, last, sid)
        if at_once is not None and self._as_it_is(first, compute_cut, last, sid):  # 3
            self.tried.add(compute_cut)
            return at_once  # 4
        found = list[Part]()
        for cut in self._sorted_cuts(compute_cut, memory_cut, first + 1, last - 1):  # 6, 7
            if self._least_ms(first, cut, last, sid, sid, sid + 1) > self.ceiling_ms:
                continue
            self.tried.add(cut)
            pair = self._pair(first, cut, last, sid)  # 8
            if pair is None:  # 10
                break  # 11
            found.append(pair)  # 9
            if pair.ms <= self.floor_ms:
                break
        return min(found, default=None)  # 14

    def bipar(self, first: int, last: int, left: int, right: int) -> Part | None:  # 16
        key = first, last, left, right
        if key not in self._known:
            self._known[key] = self._cut(*key)
        return self._known[key]

    def _cut(self, first: int, last: int, left: int, right: int) -> Part | None:
        if right == left:  # a number of stages that is no power of 2
            return self._single(first, last, left)
        if right - left == 1:  # 17
            return self.adjacent_partition(first, last, left)  # 18
        # Of three stages the first is cut off, from between its own two points (§4.2, last paragraph).
        middle = left if right - left == 2 else (left + right) // 2  # 20
        compute_cut, memory_cut = self._balanced(first, last, left, middle, right)  # 21
        found = list[Part]()
        low, high = first + middle - left + 1, last - (right - middle)
        for cut in self._sorted_cuts(compute_cut, memory_cut, low, high):  # 22, 23
            least_ms = self._least_ms(first, cut, last, left, middle, right)
            if least_ms > self.ceiling_ms or (found and least_ms >= min(found).ms):
                continue  # it cannot be the one that line 32 takes
            self.tried.add(cut)
            before = self.bipar(first, cut, left, middle)  # 24
            behind = self.bipar(cut, last, middle + 1, right) if before is not None else None  # 25
            if before is None or behind is None:  # 28
                break  # 29
            found.append(Part(max(before.ms, behind.ms), before.cuts + behind.cuts[1:]))  # 26, 27
            if found[-1].ms <= self.floor_ms:
                break
        return min(found, default=None)  # 32

    def _balanced(self, first: int, last: int, left: int, middle: int, right: int) -> tuple[int, int]:
        """CompMemBalPartition: where compute, and where memory, is balanced around the cut behind `middle`."""
        before, behind = range(left, middle + 1), range(middle + 1, right + 1)
        compute_cut = self.balance.compute_cut(first, last, len(before), len(behind))
        return compute_cut, self.balance.memory_cut(first, last, before, behind)

    def _sorted_cuts(self, compute_cut: int, memory_cut: int, low: int, high: int) -> list[int]:
        """IdentifyAndSort: from the memory-balanced point, where fitting is easiest, to the compute-balanced one.

        So what follows the first that does not fit would be harder still to fit (lines 10 and 28). Cuts that send much
        are left out for those nearby that send less (B.2); both points themselves are tried in any case.
        """
        from_cut, to_cut = sorted((compute_cut, memory_cut))
        moved = self.quiet[from_cut : to_cut + 1]
        inside = moved[(moved >= max(low, from_cut)) & (moved <= min(high, to_cut))]
        cuts: list[int] = np.unique(np.append(inside, [compute_cut, memory_cut])).tolist()
        return cuts if memory_cut <= compute_cut else cuts[::-1]

    def _pair(self, first: int, cut: int, last: int, sid: int) -> Part | None:
        """MemOpt of two adjacent stages."""
        before = self._single(first, cut, sid)
        behind = self._single(cut, last, sid + 1) if before is not None else None
        if before is None or behind is None:
            return None
        return Part(max(before.ms, behind.ms), (first, cut, last))

    def _single(self, first: int, last: int, position: int) -> Part | None:
        cell = self.problem.cell(position, first, last)
        return None if cell is None else Part(cell.ms, (first, last))

    def _as_it_is(self, first: int, cut: int, last: int, sid: int) -> bool:
        """Whether both stages fit with nothing recomputed or swapped."""
        cells = self.problem.cell(sid, first, cut), self.problem.cell(sid + 1, cut, last)
        return all(cell is not None and not (cell.fit.recompute or cell.fit.swap) for cell in cells)

    def _least_ms(self, first: int, cut: int, last: int, left: int, middle: int, right: int) -> float:
        upto = self.problem.costs.upto_ms
        before, behind = upto[cut] - upto[first], upto[last] - upto[cut]
        return float(max(before / (middle - left + 1), behind / (right - middle)))
