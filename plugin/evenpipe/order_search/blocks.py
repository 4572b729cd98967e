"""Building blocks in a V (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3.1 and appendix A).

A block says when, modulo a period of six passes, each stage has F0, F1, D1, D0 and the weight gradients. Between
neighbours it is shifted by the same offsets along each half of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Final

import numpy as np

from evenpipe.order_search.problem import Numbers, Order, Problem
from evenpipe.schedule.building_block import PERIOD

__all__ = ["blocks", "repeated_order"]

#: Of F0, F1, D1, D0, as a micro-batch meets them: +1 where it goes from the first stage to the last.
_WAY: Final = np.array([1, -1, 1, -1])


def blocks(stages: int) -> Iterator[Numbers]:
    """Yield all blocks: stages × passes (F0, F1, D1, D0, W1, W0), counted from stage 0's F0.

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
    times = np.empty((stages, 6), np.int64)
    now = -1
    for number, way in enumerate(_WAY):
        for stage in range(stages) if way > 0 else range(stages - 1, -1, -1):
            now = now + 1 + (at[stage, number] - now - 1) % PERIOD
            times[stage, number] = now
    for stage in range(stages):
        taken = set(at[stage].tolist())
        for number, of in ((4, 2), (5, 3)):  # the first places that are free behind
            place = next(
                x for x in range(times[stage, of] + 1, times[stage, of] + 1 + PERIOD) if x % PERIOD not in taken
            )
            taken.add(place % PERIOD)
            times[stage, number] = place
    return times


def repeated_order(problem: Problem, block: Numbers) -> Order:
    """Return the order in which a block comes again after every period, without the waits that it leaves."""
    stages, count = len(block), problem.micro_batches
    positions = 2 * stages
    numbers = np.arange(count)
    kinds = np.array([0, 0, 1, 1, 2, 2])
    order = np.empty((stages, 6 * count), np.int32)
    for stage in range(stages):
        there, back = stage, positions - 1 - stage
        of = np.array([there, back, back, there, back, there])
        times = (block[stage][:, None] + PERIOD * numbers).ravel()
        actions = ((kinds * positions + of) * count)[:, None] + numbers
        order[stage] = actions.ravel()[np.argsort(times, kind="stable")]
    return order
