"""How many micro-batches each stage keeps activations of, chunk by chunk, read off the schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenpipe.partition.layouts.shape import LayoutError, Pipeline
from evenpipe.schedule import BACKWARD, FORWARD, Action, ScheduleError, Size, build

__all__ = ["Live", "live_of"]

Live: TypeAlias = NDArray[np.int64]
"""Of one stage: rows of numbers of live micro-batches, by part of the model; only those that no other row exceeds."""


def live_of(pipeline: Pipeline) -> tuple[Live, ...]:
    """Of every stage, under the schedule that Megatron runs: 1F1B, interleaved where there are virtual stages."""
    p, v = pipeline.stages, pipeline.chunks
    if v > 1 and pipeline.micro_batches % p:
        raise LayoutError(
            f"--global-batch-size: {pipeline.micro_batches} micro-batches are no multiple of {p} stages, "
            "which virtual stages need: change it or --micro-batch-size"
        )
    # A stage holds no more than its warm-up, which is over long before these are.
    size = Size(p, min(pipeline.micro_batches, 2 * p * v), v)
    try:
        schedule = build("interleaved" if v > 1 else "1f1b", size).schedule
    except ScheduleError as error:
        raise LayoutError(f"the schedule of these flags: {error}") from error
    return tuple(_largest(_rows(row, stage, p, v)) for stage, row in enumerate(schedule.actions))


def _rows(actions: Iterable[Action], stage: int, stages: int, chunks: int) -> Live:
    live = np.zeros(stages * chunks, np.int64)
    seen = []
    for action in actions:
        part = action.chunk * stages + stage
        if action.kind == FORWARD:
            live[part] += 1
            seen.append(live.copy())
        elif action.kind == BACKWARD:
            live[part] -= 1
    return np.unique(seen, axis=0)


def _largest(rows: Live) -> Live:
    within: NDArray[np.bool_] = np.all(rows[:, None] <= rows[None], axis=2)
    np.fill_diagonal(within, False)
    return rows[~within.any(axis=1)]
