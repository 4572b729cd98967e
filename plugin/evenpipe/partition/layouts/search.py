"""The split whose slowest stage is fastest, within a memory limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenpipe.partition.layouts.bound import lower_bound_ms
from evenpipe.partition.layouts.labels import by_labels
from evenpipe.partition.layouts.shape import LayoutError
from evenpipe.partition.layouts.split import Cuts, Problem

__all__ = ["Found", "best_split", "moves"]

_GIB: Final = 2**30
_DIGITS: Final = 9
_SLACK: Final = 1 + 10 ** (1 - _DIGITS)


class Found(NamedTuple):
    """The best split. `proven`: no other has a faster slowest stage; else none that is a move away has (`moves`)."""

    cuts: Cuts
    proven: bool


def best_split(problem: Problem, limit_bytes: int | None = None) -> Found:
    """Smallest time of the slowest stage; among those the most even stages, then the most even parts,
    then the least memory of the stage that holds most.

    From the even split it climbs, move by move, and follows ways part by part where the result is slower than a lower
    bound. Raises LayoutError if nothing fits into `limit_bytes` a stage, with the smallest limit that a layout was
    found for.
    """
    goal = _Goal(problem, math.inf if limit_bytes is None else limit_bytes)
    bound = lower_bound_ms(problem)
    cuts = _climb(goal, problem.even)
    excess, slowest = goal.ratings(_row(cuts))[0, :2]
    proven = not excess and slowest <= bound * _SLACK
    if not proven:
        others, proven = by_labels(problem, goal.limit, math.inf if excess else float(slowest))
        proven = proven and (problem.recompute_within is None or problem.pipeline.chunks == 1)
        cuts = _climb(goal, min([cuts, *others], key=lambda one: goal.ratings(_row(one))[0].tolist()))
        excess, slowest = goal.ratings(_row(cuts))[0, :2]
        proven = proven or slowest <= bound * _SLACK
    if excess:
        least = _climb(_Least(problem, 0.0), cuts)
        needed = max(stage.peak_bytes for stage in problem.costs(least))
        raise LayoutError(
            f"memory limit {goal.limit / _GIB:.2f} GiB: no layout fits into it; one was found for {needed / _GIB:.2f} "
            "GiB: raise it, add stages or tensor parallelism, recompute, or lower --micro-batch-size"
        )
    return Found(cuts, bool(proven))


def moves(problem: Problem, cuts: Cuts) -> NDArray[np.int64]:
    """Rows: every split that one layer fewer in one part and one more in another makes, all between moved along."""
    number = np.arange(len(cuts))
    first, end = np.triu_indices(len(cuts) + 1, 1)
    between = (first[:, None] <= number) & (number < end[:, None])
    rows = np.array(cuts, np.int64) + np.concatenate([between, -1 * between])
    return np.asarray(rows[problem.allowed(rows)])


@dataclass(frozen=True)
class _Goal:
    """How good splits are."""

    problem: Problem
    limit: float

    def ratings(self, cuts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of rows of cuts: what is to be smallest, first column first."""
        forward, backward, held = self.problem.weighed(cuts)
        times = forward + backward
        parts = np.diff(self.problem.total_ms[np.pad(cuts, ((0, 0), (1, 1)), constant_values=(0, -1))], axis=1)
        excess = np.maximum(0.0, held - self.limit).sum(axis=1)
        slowest, most = times.max(axis=1), held.max(axis=1).astype(float)
        columns = [excess, slowest, (times**2).sum(axis=1), (parts**2).sum(axis=1), most]
        return _rounded(np.stack(columns, axis=1))


class _Least(_Goal):
    """The stage that holds most is to hold least."""

    def ratings(self, cuts: NDArray[np.int64]) -> NDArray[np.float64]:
        *_, held = self.problem.weighed(cuts)
        return np.stack([held.max(axis=1), (held.astype(float) ** 2).sum(axis=1)], axis=1)


def _climb(goal: _Goal, cuts: Cuts) -> Cuts:
    """From `cuts` on to the best of its moves, until none is better."""
    rating = goal.ratings(_row(cuts))[0].tolist()
    while len(rows := moves(goal.problem, cuts)):
        ratings = goal.ratings(rows)
        best = np.lexsort(ratings.T[::-1])[0]
        if ratings[best].tolist() >= rating:
            break
        cuts, rating = tuple(rows[best].tolist()), ratings[best].tolist()
    return cuts


def _row(cuts: Cuts) -> NDArray[np.int64]:
    return np.array([cuts], np.int64)


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without what adding up in another order makes different."""
    size = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(np.maximum(values, 1e-300))))
    return np.where(values > 0, np.rint(values * size) / size, 0.0)
