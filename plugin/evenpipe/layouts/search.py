"""The split whose slowest stage is fastest, within a memory limit."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenpipe.layouts.gpt import LayoutError
from evenpipe.layouts.split import Cuts, Problem

__all__ = ["Found", "best_split", "lower_bound_ms", "moves"]

_GIB: Final = 2**30
_DIGITS: Final = 9
_SLACK: Final = 1 + 10 ** (1 - _DIGITS)
_MOST: Final = 4_000  # labels that are followed
_KEPT_AT_THE_END: Final = 50
_HALVINGS: Final = 50
_LABEL_SLACK: Final = 1 + 1e-9


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
        others, proven = _by_labels(problem, goal.limit, math.inf if excess else float(slowest))
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
        """Return a row of ratings for each row of cuts: what is to be smallest, first column first."""
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


def _by_labels(problem: Problem, limit_bytes: float, slowest_ms: float) -> tuple[list[Cuts], bool]:
    """The fastest splits found, fastest first, none slower than `slowest_ms`; and whether no other can be faster.

    A label is where the parts so far end, and each stage's time. Of those that have come as far, with the same times
    (and chunks, if memory is limited) of the stages that have chunks to come, the one whose other stages are fastest is
    enough: what a stage holds only grows. Without virtual stages this is dynamic programming over stages and layers.
    Stages that have all their chunks leave no more to the others than they can do in time. Of more labels than can be
    followed, the most even ones are. What layers take that are computed again counts without virtual stages alone: then
    it is known with a stage's only part.
    """
    p, parts, whole, owners = problem.pipeline.stages, problem.pipeline.parts, len(problem.layers), problem.owners
    total = problem.total_ms
    ends, times = np.zeros((1, 0), np.int64), np.zeros((1, p))
    complete = True
    for part in range(parts):
        stage, first = int(owners[part]), ends[:, -1] if part else np.zeros(1, np.int64)
        reach = [whole] if part == parts - 1 else range(1, problem.latest[part] + 1)
        label, end = np.nonzero(first[:, None] <= np.array(reach))
        end = np.array(reach)[end]
        ends, times = np.concatenate([ends[label], end[:, None]], axis=1), times[label]
        times[:, stage] += total[end] - total[first[label]]
        firsts = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
        fitted = problem.fitted(stage, firsts, ends) if limit_bytes < math.inf else None
        if fitted is not None and parts == p:
            times[:, stage] += fitted.again_ms
        to_come = np.isin(np.arange(p), owners[part + 1 :])
        room = (slowest_ms - times[:, to_come]).sum(axis=1)
        whole_parts = ~problem.halves[end] | (end > first[label])
        fits = (
            whole_parts
            & (times[:, stage] <= slowest_ms * _LABEL_SLACK)
            & (total[-1] - total[end] <= room * _LABEL_SLACK + 1e-9)
        )
        if fitted is not None:
            fits &= fitted.held <= limit_bytes
        kept = np.flatnonzero(fits)
        kept = kept[np.argsort(times[kept][:, ~to_come].max(axis=1, initial=0.0), kind="stable")]
        ends, firsts, times = ends[kept], firsts[kept], times[kept]
        alike = [ends[:, -1:], np.rint(times[:, to_come] / total[-1] * 10**_DIGITS)]
        if limit_bytes < math.inf:
            open_parts = to_come[owners[: part + 1]]
            alike += [firsts[:, open_parts], ends[:, open_parts]]
        kept = np.unique(np.concatenate(alike, axis=1), axis=0, return_index=True)[1]
        ends, times = ends[kept], times[kept]
        if len(ends) > _MOST:
            complete = False
            kept = np.argsort(_unevenness(problem, ends, times, part), kind="stable")[:_MOST]
            ends, times = ends[kept], times[kept]
    order = np.argsort(times.max(axis=1), kind="stable")[:_KEPT_AT_THE_END]
    return [tuple(row[:-1]) for row in ends[order].tolist()], complete


def _unevenness(
    problem: Problem, ends: NDArray[np.int64], times: NDArray[np.float64], part: int
) -> NDArray[np.float64]:
    """Return how far the stages, and what has been done, are from an equal share."""
    share = problem.total_ms[-1] * (part + 1) / problem.pipeline.parts
    behind = problem.total_ms[ends[:, -1]] - share
    return np.asarray((times**2).sum(axis=1) + behind**2)


def lower_bound_ms(problem: Problem) -> float:
    """Return the least time in which stages can do all layers between them, if each may take any of them.

    Embedding and loss stay where they are, MTP layers are tried on each stage, which differ only in being the last.
    """
    first, *middle, last = problem.layers
    transformer = [layer for layer in middle if layer.kind != "mtp"]
    mtp = sum(layer.total_ms for layer in middle if layer.kind == "mtp")
    counts = Counter(layer.total_ms for layer in transformer)
    stages = problem.pipeline.stages
    fixed = [0.0] * stages
    end, before = problem.owners[-1], problem.owners[-2:][0]
    fixed[0] += first.total_ms
    fixed[end] += last.total_ms
    homes = {end, before} if mtp and problem.mtp_apart and stages > 2 else {end}
    return min(_least([ms + mtp * (stage == home) for stage, ms in enumerate(fixed)], counts) for home in homes)


def _least(fixed: list[float], counts: Counter[float]) -> float:
    total = sum(fixed) + sum(ms * count for ms, count in counts.items())
    low, high = max(max(fixed), total / len(fixed)), total
    if _fits(fixed, counts, low):
        return low
    for _ in range(_HALVINGS):
        half = (low + high) / 2
        low, high = (low, half) if _fits(fixed, counts, half) else (half, high)
    return low


def _fits(fixed: list[float], counts: Counter[float], limit: float) -> bool:
    """Return whether all layers find room: exact for layers of two durations, for more than two what they add up to."""
    if len(counts) > 2:
        return True
    durations = sorted(counts.items(), key=lambda item: item[1])
    few, number = durations[0] if len(durations) == 2 else (math.inf, 0)
    many, needed = durations[-1] if durations else (0.0, 0)
    most = [0] + [-1] * number  # by how many of the few are placed: the most of the many beside them
    for taken in fixed:
        room = limit * (1 + 1e-12) - taken
        grown = [-1] * (number + 1)
        for placed, beside in enumerate(most):
            extra = 0
            while beside >= 0 and placed + extra <= number and (left := room - (few * extra if extra else 0.0)) >= 0:
                fitting = math.floor(left / many) if many else needed
                grown[placed + extra] = max(grown[placed + extra], beside + fitting)
                extra += 1
        most = grown
    return most[number] >= needed
