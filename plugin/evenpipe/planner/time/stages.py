"""Seconds that each stage computes for a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from evenpipe.planner.operations.parts import Block, Blocks, Part
from evenpipe.planner.time.kernels import Kernels

__all__ = ["PartTime", "part_times"]


class PartTime(NamedTuple):
    """Seconds of one part of the pipeline for one micro-batch; ``weights`` is the part of backward nobody waits for."""

    forward: float
    backward: float
    weights: float


def part_times(parts: Sequence[Part], blocks: Blocks, kernels: Kernels) -> list[PartTime]:
    """One of each part; backward has in it what is recomputed."""

    @cache
    def of(block: Block) -> PartTime:
        operations = blocks.operations[block]
        forward = kernels.seconds(work for one in operations for work in one.forward)
        weights = kernels.seconds(work for one in operations for work in one.weight_gradient)
        backward = kernels.seconds(work for one in operations for work in one.backward)
        again = kernels.seconds(work for one in blocks.recomputed(block).operations for work in one.forward)
        return PartTime(forward, backward + weights + again, weights)

    return [
        PartTime(*(sum(of(block)[field] * count for block, count in part.items()) for field in range(3)))
        for part in parts
    ]
