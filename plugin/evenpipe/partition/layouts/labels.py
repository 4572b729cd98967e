"""Splits found part by part: every way that can still be fast, as long as these are not too many."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evenpipe.partition.layouts.split import Cuts, Problem

__all__ = ["by_labels"]

_MOST: Final = 4_000
_KEPT_AT_THE_END: Final = 50
_SLACK: Final = 1 + 1e-9
_DIGITS: Final = 9


def by_labels(problem: Problem, limit_bytes: float, slowest_ms: float) -> tuple[list[Cuts], bool]:
    """The fastest splits found, fastest first, none slower than `slowest_ms`; and whether no other can be faster.

    A label is where the parts so far end, and each stage's time. Of those that have come as far, with the same times
    (and chunks, if memory is limited) of the stages that have chunks to come, the one whose other stages are fastest is
    enough: what a stage holds only grows. Without virtual stages this is dynamic programming over stages and layers.
    Stages that have all their chunks leave no more to the others than they can do in time. Of more labels than can be
    followed, the most even ones are. What layers take that are computed again counts without virtual stages alone: then
    it is known with a stage's only part.
    """
    p, parts, whole = problem.pipeline.stages, problem.pipeline.parts, len(problem.layers)
    total = problem.total_ms
    ends, times = np.zeros((1, 0), np.int64), np.zeros((1, p))
    complete = True
    for part in range(parts):
        stage, first = part % p, ends[:, -1] if part else np.zeros(1, np.int64)
        reach = [whole] if part == parts - 1 else range(1, problem.latest[part] + 1)
        label, end = np.nonzero(first[:, None] <= np.array(reach))
        end = np.array(reach)[end]
        ends, times = np.concatenate([ends[label], end[:, None]], axis=1), times[label]
        times[:, stage] += total[end] - total[first[label]]
        firsts = np.pad(ends[:, :-1], ((0, 0), (1, 0)))
        fitted = problem.fitted(stage, firsts, ends) if limit_bytes < math.inf else None
        if fitted is not None and parts == p:
            times[:, stage] += fitted.again_ms
        done = max(0, part + 1 - (parts - p))
        room = (slowest_ms - times[:, done:]).sum(axis=1)
        whole_parts = ~problem.halves[end] | (end > first[label])
        fits = whole_parts & (times[:, stage] <= slowest_ms * _SLACK) & (total[-1] - total[end] <= room * _SLACK + 1e-9)
        if fitted is not None:
            fits &= fitted.held <= limit_bytes
        kept = np.flatnonzero(fits)
        kept = kept[np.argsort(times[kept, :done].max(axis=1, initial=0.0), kind="stable")]
        ends, firsts, times = ends[kept], firsts[kept], times[kept]
        alike = [ends[:, -1:], np.rint(times[:, done:] / total[-1] * 10**_DIGITS)]
        if limit_bytes < math.inf:
            open_parts = np.arange(part + 1) % p >= done
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
    """How far the stages, and what has been done, are from an equal share."""
    share = problem.total_ms[-1] * (part + 1) / problem.pipeline.parts
    behind = problem.total_ms[ends[:, -1]] - share
    return np.asarray((times**2).sum(axis=1) + behind**2)
