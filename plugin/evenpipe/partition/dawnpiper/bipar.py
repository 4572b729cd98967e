"""Binary pipeline partitioning (DawnPiper §4.2, Algorithm 1); comments give the lines of the paper."""

from __future__ import annotations

from math import inf, isinf
from typing import NamedTuple

import numpy as np

from evenpipe.partition.dawnpiper.balance import Balance, quiet
from evenpipe.partition.dawnpiper.problem import Problem

__all__ = ["Binary", "Part", "bipar"]


class Part(NamedTuple):
    """A part of the model, cut: boundaries from its first to its last, and the ms of its longest position."""

    ms: float
    cuts: tuple[int, ...]


class Binary(NamedTuple):
    """The partition that Algorithm 1 finds; None if none that it tries fits.

    nodes_tried: how many different nodes it tried to cut behind, over all ranges. widest: φ, the most places between
    the compute-balanced and the memory-balanced point of a range. whole: it was followed to its end.
    """

    part: Part | None
    nodes_tried: int
    widest: int
    whole: bool


def bipar(
    problem: Problem,
    floor_ms: float = 0.0,
    ceiling_ms: float = inf,
    most_weighed: float = inf,
    most_parts: float = inf,
) -> Binary:
    """Return the partition of BiPar(N, 1, ℓ). Positions count from 0 here; a repeated part keeps its first cuts.

    `floor_ms`: a lower bound of all partitions, so that the search for a part ends where it is reached. `ceiling_ms`:
    cuts that take longer by `Problem.lower_ms` are not weighed, even if nothing else fits. After `most_weighed` ranges
    have been weighed, or `most_parts` parts cut, the best that is known by then is taken.
    """
    search = _BiPar(problem, floor_ms, ceiling_ms, most_weighed, most_parts)
    part = search.bipar(0, problem.costs.last, 0, problem.copies.positions - 1)
    return Binary(part, len(search.tried), search.widest, not search.cut_short)


class _BiPar:
    def __init__(
        self, problem: Problem, floor_ms: float, ceiling_ms: float, most_weighed: float, most_parts: float
    ) -> None:
        self.problem, self.floor_ms, self.ceiling_ms = problem, floor_ms, ceiling_ms
        self._most_weighed, self._most_parts = problem.weighed + most_weighed, most_parts
        self.balance = Balance(problem)
        self.quiet = quiet(problem.costs, problem.copies.positions)
        self.tried = set[int]()
        self.widest, self.cut_short = 0, False
        self._known: dict[tuple[int, int, int, int], Part | None] = {}

    def adjacent_partition(self, first: int, last: int, sid: int) -> Part | None:  # 1
        compute_cut, memory_cut = self._balanced(first, last, sid, sid, sid + 1)  # 2
        cuts = self._sorted_cuts(compute_cut, memory_cut, first + 1, last - 1)  # 6
        bounds = self._bounds(first, cuts, last, sid)
        least_ms, exact = bounds[compute_cut]
        if exact and least_ms < inf:  # 3
            self.tried.add(compute_cut)
            return Part(least_ms, (first, compute_cut, last))  # 4
        parts = list[Part]()
        for cut in cuts:  # 7
            least_ms, exact = bounds[cut]
            if self.ceiling_ms < least_ms < inf:
                continue
            self.tried.add(cut)
            ms = least_ms if exact or least_ms == inf else self._mem_opt(first, cut, last, sid)  # 8
            if ms == inf:  # 10
                break  # 11
            parts.append(Part(ms, (first, cut, last)))  # 9
            if ms <= self.floor_ms or self._ended:
                break
        return min(parts, default=None)  # 14

    def bipar(self, first: int, last: int, left: int, right: int) -> Part | None:  # 16
        key = first, last, left, right
        if key not in self._known:
            if self._ended:
                return None
            self._known[key] = self._cut(*key)
        return self._known[key]

    @property
    def _ended(self) -> bool:
        self.cut_short |= self.problem.weighed > self._most_weighed or len(self._known) > self._most_parts
        return self.cut_short

    def _cut(self, first: int, last: int, left: int, right: int) -> Part | None:
        if right == left:  # a number of stages that is no power of 2
            return self._single(first, last, left)
        if right - left == 1:  # 17
            return self.adjacent_partition(first, last, left)  # 18
        # Of three stages the first is cut off, between its own two points (§4.2, last paragraph).
        middle = left if right - left == 2 else (left + right) // 2  # 20
        compute_cut, memory_cut = self._balanced(first, last, left, middle, right)  # 21
        parts = list[Part]()
        low, high = first + middle - left + 1, last - (right - middle)
        for cut in self._sorted_cuts(compute_cut, memory_cut, low, high):  # 22, 23
            least_ms = self._least_ms(first, cut, last, left, middle, right)
            if least_ms > self.ceiling_ms or (parts and least_ms >= min(parts).ms):
                continue  # line 32 cannot take it
            self.tried.add(cut)
            before = self.bipar(first, cut, left, middle)  # 24
            behind = self.bipar(cut, last, middle + 1, right) if before is not None else None  # 25
            if before is None or behind is None:  # 28
                if isinf(self.ceiling_ms):
                    break  # 29
                continue  # it may fit, above the ceiling
            parts.append(Part(max(before.ms, behind.ms), before.cuts + behind.cuts[1:]))  # 26, 27
            if parts[-1].ms <= self.floor_ms or self._ended:
                break
        return min(parts, default=None)  # 32

    def _balanced(self, first: int, last: int, left: int, middle: int, right: int) -> tuple[int, int]:
        """CompMemBalPartition: the cuts behind `middle` that balance compute, and memory, around it."""
        before, behind = range(left, middle + 1), range(middle + 1, right + 1)
        compute_cut = self.balance.compute_cut(first, last, len(before), len(behind))
        return compute_cut, self.balance.memory_cut(first, last, before, behind)

    def _sorted_cuts(self, compute_cut: int, memory_cut: int, low: int, high: int) -> list[int]:
        """IdentifyAndSort: from the memory-balanced point, where fitting is easiest, to the compute-balanced one.

        So cuts behind the first that does not fit are harder still to fit (lines 10 and 28). A cut nearby that sends
        less replaces one that sends much (B.2); both points themselves are tried in any case.
        """
        from_cut, to_cut = sorted((compute_cut, memory_cut))
        moved = self.quiet[from_cut : to_cut + 1]
        inside = moved[(moved >= max(low, from_cut)) & (moved <= min(high, to_cut))]
        cuts: list[int] = np.unique(np.append(inside, [compute_cut, memory_cut])).tolist()
        self.widest = max(self.widest, len(cuts))
        return cuts if memory_cut <= compute_cut else cuts[::-1]

    def _bounds(self, first: int, cuts: list[int], last: int, sid: int) -> dict[int, tuple[float, bool]]:
        """Return lower bounds of the longer of two adjacent stages, infinite if one cannot fit; and which are exact."""
        ascending = np.sort(cuts)
        before, exact_before = self.problem.lower_ms(sid, np.array([first]), ascending)
        behind, exact_behind = self.problem.lower_ms(sid + 1, ascending, np.array([last]))
        least_ms = np.maximum(before[0], behind[:, 0]).tolist()
        exact = (exact_before[0] & exact_behind[:, 0]).tolist()
        return dict(zip(ascending.tolist(), zip(least_ms, exact, strict=True), strict=True))

    def _mem_opt(self, first: int, cut: int, last: int, sid: int) -> float:
        """MemOpt: the longer of two adjacent stages, infinite if one does not fit."""
        before = self._single(first, cut, sid)
        behind = self._single(cut, last, sid + 1) if before is not None else None
        return max(before.ms, behind.ms) if before is not None and behind is not None else inf

    def _single(self, first: int, last: int, position: int) -> Part | None:
        cell = self.problem.cell(position, first, last)
        return None if cell is None else Part(cell.ms, (first, last))

    def _least_ms(self, first: int, cut: int, last: int, left: int, middle: int, right: int) -> float:
        upto = self.problem.costs.upto_ms
        before, behind = upto[cut] - upto[first], upto[last] - upto[cut]
        return float(max(before / (middle - left + 1), behind / (right - middle)))
