"""Where cuts balance compute, or memory, between stages (DawnPiper §4.1, Appendix B.1 with Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from evenpipe.partition.costs.matrices import Costs, Numbers
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.profile import Node

__all__ = ["Balance", "evenly", "one_copy_bytes", "quiet", "running_peak_cuts"]

#: How far a cut may move, as a part of the mean time of a stage: so little that neither time nor memory shows it.
_NEAR = 0.01


def quiet(costs: Costs, positions: int) -> Numbers:
    """For each boundary, the one nearby that sends least over its cut; of several, the nearest.

    Where values of several nodes would be sent, that is behind the lowest leaf that they have in common. What crosses
    every cut nearby, as an embedding that all layers read, adds the same to each: it is disregarded, as it has to be.
    """
    near_ms = _NEAR * costs.upto_ms[-1] / positions
    lows = np.maximum(np.searchsorted(costs.upto_ms, costs.upto_ms - near_ms, "left"), 1)
    highs = np.minimum(np.searchsorted(costs.upto_ms, costs.upto_ms + near_ms, "right"), costs.last)
    moved = np.arange(costs.last + 1)
    for cut in range(1, costs.last):
        near = np.arange(lows[cut], highs[cut])
        volume = costs.cut_bytes[near]
        least = near[volume == volume.min()]
        moved[cut] = least[np.abs(least - cut).argmin()]
    return moved


def evenly(boundaries: Sequence[int], parts: int) -> tuple[int, ...]:
    """Of these, those that leave as many pieces in each part, as nearly as can be; both ends among them."""
    count = len(boundaries) - 1
    return tuple(boundaries[round(count * part / parts)] for part in range(parts + 1))


def one_copy_bytes(nodes: Sequence[Node]) -> int:
    """What the whole model takes with one copy of everything: the running peak of Algorithm 2 over all of its nodes."""
    current = peak = 0
    for node in nodes:
        current += node.activation_bytes + node.parameter_bytes + node.optimizer_bytes
        peak = max(peak, current)
        current -= node.released_bytes
    return peak


def running_peak_cuts(nodes: Sequence[Node], total_bytes: int, copies: Sequence[int]) -> list[int]:
    """Algorithm 2 as printed: the last node of every stage but the last, where the running peaks reach their shares.

    `copies` stands in place of PipeDream's ℓ : (ℓ − 1) : … : 1, for other schedules. `total_bytes` is M_G, what the
    model takes with one copy (`one_copy_bytes`): its input list calls it "GPU peak memory limit", but by line 5 the
    stages' shares M_x add up to it, so with a GPU's limit the first stages of a smaller model would take all nodes.
    """
    count = len(copies)
    found = list[int]()
    stage, current, peak = 0, 0, 0  # 1
    total = Fraction(0)
    for stage_copies in copies:  # 2
        total += Fraction(copies[0], stage_copies)  # 3
    first_share = Fraction(total_bytes) / total  # 5
    share = first_share
    for number, node in enumerate(nodes):  # 6
        current += node.activation_bytes + node.parameter_bytes + node.optimizer_bytes  # 7
        peak = max(current, peak)  # 8
        current -= node.released_bytes  # 9
        if peak >= share:  # 10
            found.append(number)  # 11
            stage += 1
            if stage == count - 1:  # 14: what is left is the last stage's
                break  # 15
            share = Fraction(copies[0], copies[stage]) * first_share  # 12
            current = peak = 0  # 13
    return found


class Balance:
    """The points of a problem; boundaries and positions as in `Problem`. Each cut has room for the positions beside it.

    As in Algorithm 2 nodes are added up in order. Weights and activations each count in their own numbers of copies,
    and bytes in those that the memory limit is held against: with the same number for both, it is Equation 2.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        costs, copies = problem.costs, problem.copies
        every = np.arange(costs.last + 1)
        start = every[:1]
        saved = costs.saved(start, every)[0]
        self._held = [
            own * saved + costs.static(start, every, versions)[0]
            for own, versions in zip(copies.own, copies.versions, strict=True)
        ]

    def compute_cut(self, first: int, last: int, left: int, right: int) -> int:
        """ρ_cb: where so many positions to its `left` and its `right` have the same time each, as nearly as can be."""
        upto = self.problem.costs.upto_ms
        low, high = first + left, last - right
        aim = upto[first] + (upto[last] - upto[first]) * left / (left + right)
        behind = min(high, max(low, int(np.searchsorted(upto, aim))))
        return min((max(low, behind - 1), behind), key=lambda cut: max(
            (upto[cut] - upto[first]) / left, (upto[last] - upto[cut]) / right
        ))  # fmt: skip

    def memory_cut(self, first: int, last: int, left: range, right: range) -> int:
        """ρ_mb: behind the positions `left`, where they and those of `right` have the same peak bytes each."""
        positions = [*left, *right]
        cuts = self._filled(first, last, positions)
        return min(last - len(right), max(first + len(left), cuts[len(left) - 1]))

    def compute_cuts(self) -> tuple[int, ...]:
        """All boundaries, with compute balanced over all positions."""
        count, last = self.problem.copies.positions, self.problem.costs.last
        cuts = [0]
        for position in range(count - 1):
            cuts.append(self.compute_cut(cuts[-1], last, 1, count - 1 - position))
        return (*cuts, last)

    def layer_cuts(self) -> tuple[int, ...]:
        """All boundaries, with as many layers for every position; or nodes, in a model without as many layers."""
        costs, positions = self.problem.costs, self.problem.copies.positions
        layers = costs.layers
        return evenly(layers if len(layers) > positions else range(costs.last + 1), positions)

    def printed_cuts(self) -> tuple[int, ...] | None:
        """All boundaries by Algorithm 2 as printed, behind the nearest cuts; None where it leaves stages empty.

        It adds up running peaks of stages, whose sum need not be the model's, so that there may be nodes for fewer.
        """
        costs, copies = self.problem.costs, self.problem.copies
        nodes = costs.profile.nodes
        behind = np.array(running_peak_cuts(nodes, one_copy_bytes(nodes), copies.own)) + 1
        cuts = (0, *(int(np.abs(costs.starts - start).argmin()) for start in behind), costs.last)
        full = len(cuts) == copies.positions + 1 and all(before < after for before, after in pairwise(cuts))
        return cuts if full else None

    def memory_cuts(self) -> tuple[int, ...]:
        """All boundaries, with memory balanced over all positions."""
        count, last = self.problem.copies.positions, self.problem.costs.last
        inner = self._filled(0, last, range(count))[:-1]
        return (0, *(min(last - count + k, max(k, cut)) for k, cut in enumerate(_ascending(inner), 1)), last)

    def _filled(self, first: int, last: int, positions: Sequence[int]) -> list[int]:
        """Where each position ends when all are filled to the least level that holds all nodes."""
        low, high = 0.0, max(float(self._held[k][last] - self._held[k][first]) for k in positions)
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
        cuts = list[int]()
        for position in positions:
            held: Numbers = self._held[position]
            start = cuts[-1] if cuts else first
            cuts.append(max(start, int(held.searchsorted(held[start] + level, "right")) - 1))
        return cuts


def _ascending(cuts: Sequence[int]) -> list[int]:
    """Each at least one after the one before."""
    found = list[int]()
    for cut in cuts:
        found.append(max(cut, found[-1] + 1) if found else cut)
    return found
