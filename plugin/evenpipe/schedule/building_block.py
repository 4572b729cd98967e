"""A stage's order as a building block that is repeated (Pipeline Parallelism with Controllable Memory, 2405.15362)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from evenpipe.schedule.actions import INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind, Unit

__all__ = ["PERIOD", "Pass", "repeated"]

#: Passes of a micro-batch on a stage with two chunks: F, D and W of each.
PERIOD: Final = 6


class Pass(NamedTuple):
    """When, in passes after the first one of stage 0, a stage has the first micro-batch's forward or input gradient."""

    at: int
    kind: Kind
    chunk: int


def repeated(block: Sequence[Pass], micro_batches: int) -> list[Action]:
    """Return a stage's order: the block again after every period, without the waits that it leaves.

    Weight gradients take the first free places after their input gradients. Passes are apart, modulo the period.
    """
    at = {one.at + PERIOD * i: Action(one.kind, i, one.chunk) for one in block for i in range(micro_batches)}
    row, pending = list[Action](), deque[Unit]()
    for time in range(max(at) + 1):
        if time in at:
            row.append(at[time])
            pending.extend([at[time].unit] * (at[time].kind == INPUT_GRADIENT))
        elif pending:
            row.append(Action(WEIGHT_GRADIENT, *pending.popleft()))
    return [*row, *(Action(WEIGHT_GRADIENT, *unit) for unit in pending)]
