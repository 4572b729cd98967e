"""A time that no slowest stage can be below, whatever the order of the layers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

from evenpipe.partition.layouts.split import Problem

__all__ = ["lower_bound_ms"]

_HALVINGS: Final = 50


def lower_bound_ms(problem: Problem) -> float:
    """The least time in which stages can do all layers between them, if each may take any of them.

    Embedding and loss stay where they are, MTP layers are tried on each stage, which differ only in being the last.
    """
    first, *middle, last = problem.layers
    transformer = [layer for layer in middle if layer.kind != "mtp"]
    mtp = sum(layer.total_ms for layer in middle if layer.kind == "mtp")
    counts = Counter(layer.total_ms for layer in transformer)
    stages = problem.pipeline.stages
    fixed = [0.0] * stages
    fixed[0] += first.total_ms
    fixed[-1] += last.total_ms
    homes = {stages - 1, 1} if mtp and problem.mtp_apart and stages > 2 else {stages - 1}
    return min(_least(_with(fixed, home, mtp), counts) for home in homes)


def _with(fixed: list[float], stage: int, milliseconds: float) -> list[float]:
    return [ms + milliseconds * (number == stage) for number, ms in enumerate(fixed)]


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
    """Whether all layers find room: exact for layers of two durations, for more than two what they add up to."""
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
