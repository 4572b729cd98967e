"""Building blocks in a V (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3.1 and appendix A).

A block says when, modulo a period of six passes, each stage has F0, F1, D1 and D0. Between neighbours it is shifted by
the same offsets along each half of the stages. Weight gradients take the first free places after their input gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Final

import numpy as np

from evenpipe.order_search.justifying import pushed_back
from evenpipe.order_search.problem import Numbers, Order, Problem
from evenpipe.schedule.building_block import PERIOD

__all__ = ["blocks", "closed_up_order", "repeated_order"]

#: Of F0, F1, D1, D0, as a micro-batch meets them: +1 where it goes from the first stage to the last.
_WAY: Final = np.array([1, -1, 1, -1])


def blocks(stages: int) -> Iterator[Numbers]:
    """Yield all blocks: stages × passes (F0, F1, D1, D0), counted from stage 0's F0.

    F0 and D1 are delayed by 1 to 5 passes a stage, less or as much in the second part of the stages as in the first,
    F1 and D0, which go the other way, by 1.
    """
    for residues in permutations(range(1, PERIOD), 3):
        for first in range(1, PERIOD):
            for second in range(1, first + 1):
                for bend in range(1, stages) if second < first else (stages - 1,):
                    delays = np.where(np.arange(stages - 1) < bend, first, second)
                    made = _block(stages, (0, *residues), delays)
                    if made is not None:
                        yield made


def _block(stages: int, residues: tuple[int, ...], delays: Numbers) -> Numbers | None:
    """None where two passes of a stage are at the same time."""
    down = np.concatenate([[0], np.cumsum(delays)])  # F0 and D1: later and later along the stages
    along = np.stack([down, -np.arange(stages), down, -np.arange(stages)], axis=1)
    at = (np.array(residues) + along) % PERIOD
    if any(len(set(row)) < 4 for row in at.tolist()):
        return None
    # The least times that these residues allow a micro-batch to go through the model and back.
    times = np.empty((stages, 4), np.int64)
    now = -1
    for number, way in enumerate(_WAY):
        for stage in range(stages) if way > 0 else range(stages - 1, -1, -1):
            now = now + 1 + (at[stage, number] - now - 1) % PERIOD
            times[stage, number] = now
    return times


def repeated_order(problem: Problem, block: Numbers) -> Order:
    """Return the order in which a block comes again after every period, without the waits that it leaves."""
    slots, on = _slots(problem, block), problem.graph.stage
    by_slot = np.argsort(slots, kind="stable").astype(np.int32)
    return by_slot[np.argsort(on[by_slot], kind="stable")].reshape(len(block), -1)


def closed_up_order(problem: Problem, block: Numbers) -> Order:
    """Return a block's order as its authors close it up: even passes, as late as possible, from the last to the first.

    No stage holds more than in the repeated block. It is `evenpipe.schedule.building_block.closed_up`, compiled.
    """
    return pushed_back(problem, repeated_order(problem, block), _slots(problem, block))


def _slots(problem: Problem, block: Numbers) -> Numbers:
    """Return when each action is, in passes, if the block comes again after every period."""
    stages, count = len(block), problem.micro_batches
    slots = np.empty((3, 2 * stages, count), np.int64)  # of F, D and W
    for stage in range(stages):
        there, back = stage, 2 * stages - 1 - stage
        given = block[stage][:, None] + PERIOD * np.arange(count)
        slots[0, there], slots[0, back], slots[1, back], slots[1, there] = given
        free = np.setdiff1d(np.arange(given.max() + 1 + 2 * count), given, assume_unique=True)
        inputs = np.sort(given[2:], axis=None)
        waits = np.searchsorted(free, inputs) - np.arange(2 * count)
        weights = free[np.maximum.accumulate(waits) + np.arange(2 * count)]
        for chunk, part in ((2, back), (3, there)):
            slots[2, part] = weights[np.searchsorted(inputs, given[chunk])]
    return slots.ravel()
