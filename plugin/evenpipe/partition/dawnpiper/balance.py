"""Cuts that balance compute or memory between stages (DawnPiper §4.1, B.1 with Algorithm 2), or send little (B.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenpipe.partition.costs.matrices import Costs, Numbers
from evenpipe.partition.dawnpiper.problem import Problem

__all__ = ["Balance", "evenly", "quiet"]

#: How far a cut may move, as a part of the mean time of a stage: so little that neither time nor memory shows it.
_NEAR = 0.01


class Balance:
    """The balance points of a problem; each cut leaves a node for every position beside it.

    As in Algorithm 2 nodes are added up in order. Weights and activations each count in their own numbers of copies, in
    the bytes that the memory limit is held against; with equal numbers of copies, that is Equation 2.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        costs, copies = problem.costs, problem.copies
        every = np.arange(costs.last + 1)
        saved = costs.saved(every[:1], every)[0]
        self._upto_bytes = [
            own * saved + costs.static(every[:1], every, versions)[0]
            for own, versions in zip(copies.own, copies.versions, strict=True)
        ]

    def compute_cut(self, first: int, last: int, left: int, right: int) -> int:
        """Return ρ_cb: the cut at which `left` positions before it and `right` behind it take the same time each."""
        upto = self.problem.costs.upto_ms
        low, high = first + left, last - right
        aim = upto[first] + (upto[last] - upto[first]) * left / (left + right)
        behind = min(high, max(low, int(np.searchsorted(upto, aim))))

        def longer_ms(cut: int) -> float:
            return float(max((upto[cut] - upto[first]) / left, (upto[last] - upto[cut]) / right))

        return min(max(low, behind - 1), behind, key=longer_ms)

    def memory_cut(self, first: int, last: int, left: range, right: range) -> int:
        """Return ρ_mb: the cut at which the positions `left` and `right` of it have the same peak bytes each."""
        cuts = self._filled(first, last, [*left, *right])
        return min(last - len(right), max(first + len(left), cuts[len(left) - 1]))

    def compute_cuts(self) -> tuple[int, ...]:
        """Return all boundaries, with compute balanced over all positions."""
        count, last = self.problem.copies.positions, self.problem.costs.last
        cuts = [0]
        for position in range(count - 1):
            cuts.append(self.compute_cut(cuts[-1], last, 1, count - 1 - position))
        return (*cuts, last)

    def memory_cuts(self) -> tuple[int, ...]:
        """Return all boundaries, with memory balanced over all positions; each is behind the one before it."""
        count, last = self.problem.copies.positions, self.problem.costs.last
        cuts = [0]
        ascending = list[int]()
        for number, cut in enumerate(self._filled(0, last, range(count))[:-1], 1):
            ascending.append(max(cut, ascending[-1] + 1) if ascending else cut)
            cuts.append(min(last - count + number, max(number, ascending[-1])))
        return (*cuts, last)

    def layer_cuts(self) -> tuple[int, ...]:
        """Return all boundaries, with as many layers for every position; nodes, in a model with too few layers."""
        costs, positions = self.problem.costs, self.problem.copies.positions
        layers = costs.layers
        return evenly(layers if len(layers) > positions else range(costs.last + 1), positions)

    def _filled(self, first: int, last: int, positions: Sequence[int]) -> list[int]:
        """Return where each position ends when all are filled to the least level that holds all nodes."""
        low, high = 0.0, max(float(self._upto_bytes[k][last] - self._upto_bytes[k][first]) for k in positions)
        for _ in range(40):
            level = (low + high) / 2
            if self._fill(first, positions, level)[-1] >= last:
                high = level
            else:
                low = level
            if high - low <= 1e-6 * high:
                break
        return self._fill(first, positions, high)

    def _fill(self, first: int, positions: Sequence[int], level: float) -> list[int]:
        cuts = [first]
        for position in positions:
            upto = self._upto_bytes[position]
            cuts.append(max(cuts[-1], int(upto.searchsorted(upto[cuts[-1]] + level, "right")) - 1))
        return cuts[1:]


def evenly(boundaries: Sequence[int], parts: int) -> tuple[int, ...]:
    """Return both ends and the boundaries between which all parts have as many pieces, as nearly as possible."""
    count = len(boundaries) - 1
    return tuple(boundaries[round(count * part / parts)] for part in range(parts + 1))


def quiet(costs: Costs, positions: int) -> Numbers:
    """Return, for each boundary, the one nearby whose cut sends least; of several, the nearest (B.2).

    Where values of several nodes would be sent, that cut is behind their lowest common leaf. A value that crosses every
    cut nearby, such as an embedding that all layers read, adds the same to each, so it is disregarded.
    """
    lows, highs = costs.near(_NEAR * costs.upto_ms[-1] / positions)
    moved = np.arange(costs.last + 1)
    for cut in range(1, costs.last):
        near = np.arange(lows[cut], highs[cut])
        sent = costs.cut_bytes[near]
        least = near[sent == sent.min()]
        moved[cut] = least[np.abs(least - cut).argmin()]
    return moved
