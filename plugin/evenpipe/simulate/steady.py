"""The steady part of a simulated batch, which a longer batch repeats."""

from __future__ import annotations

from typing import Final

import numpy as np

from evenpipe.schedule import Column, Program
from evenpipe.simulate.result import Simulation

__all__ = ["period_ms"]

#: Of the batch's time: by how much sums of the same times round differently.
_ROUNDING: Final = 1e-11


def period_ms(program: Program, simulation: Simulation, period: int) -> float | None:
    """Return how many milliseconds later all happens ``period`` micro-batches on, where the batch is steady.

    There each action of every stage is what the one a period later is, starts so much earlier, and so does the arrival
    of what it sends; for as many actions in a row as there are in a period, and as any of them waits back. Times follow
    from those before by sums and maxima, so they stay as far apart for as long as the order repeats (Baccelli et al.
    1992, "Synchronization and Linearity", §3.7). None where no part of the batch is steady.
    """
    table, stages = program.schedule.table, program.schedule.stages
    actions, m = len(table.kind) // stages, program.schedule.micro_batches
    if actions % m or any(np.diff(table.first) != actions):  # stages evict, or update weights
        return None
    shift = actions // m * period

    def later(column: Column) -> Column:
        rows = column.reshape(stages, actions)
        return np.asarray(rows[:, shift:] - rows[:, :-shift])

    wiring, starts = program.wiring, np.concatenate(simulation.starts_ms)
    arrives = np.where(wiring.moves >= 0, np.asarray(simulation.arrives_ms)[wiring.moves], starts)
    steps = later(starts)
    step = float(np.median(steps)) if steps.size else 0.0
    alike = (later(table.kind.view(np.int8)) == 0) & (later(table.chunk) == 0) & (later(table.micro_batch) == period)
    for times in (steps, later(arrives)):
        alike &= np.abs(times - step) <= _ROUNDING * simulation.makespan_ms
    ends = np.flatnonzero(np.diff(alike.all(axis=0), prepend=False, append=False))
    if not len(ends):
        return None
    longest = np.argmax(ends[1::2] - ends[::2])
    first, end = ends[2 * longest : 2 * longest + 2].tolist()
    numbers = np.arange(len(table.kind)) - np.repeat(table.first[:-1], actions)
    back = [np.where(one >= 0, numbers - numbers[one], 0) for one in (wiring.senders, wiring.settles)]
    waits = max(int(one.reshape(stages, actions)[:, first : end + shift].max()) for one in back)
    return step if end - first >= max(shift, waits) else None
