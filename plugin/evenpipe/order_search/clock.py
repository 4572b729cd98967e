"""Orders on the clock: when each action ends.

A message is there so long after what makes it. In the simulator it also waits until its receive is posted and until its
link is free; there a batch takes as long or longer.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from evenpipe.order_search.compiled import compiled
from evenpipe.order_search.problem import Graph, Numbers, Order, Problem

__all__ = ["NEVER", "ends", "makespan"]

#: The time of an order that deadlocks.
NEVER: Final = 1e18


def makespan(problem: Problem, order: Order, takes_ms: Numbers | None = None, longer: float = 1.0) -> float:
    """Return the milliseconds of an order; NEVER if it deadlocks.

    takes_ms: other times than the problem's. longer: how much longer messages take.
    """
    takes_ms = problem.takes_ms if takes_ms is None else takes_ms
    ended, sequence = np.empty(len(takes_ms)), np.empty(len(takes_ms), np.int32)
    return float(ends(order, takes_ms, problem.graph, longer, ended, sequence))


@compiled
def ends(order: Order, takes_ms: Numbers, graph: Graph, longer: float, ended: Numbers, sequence: Numbers) -> float:
    """Return when all actions have ended; NEVER for a deadlock.

    ``ended`` gets the end of each action, ``sequence`` the actions such that each comes after what it waits for.
    Every stage goes as far as it can; who makes what another stage waits for next puts that one into the queue.
    """
    stages, width = order.shape
    ended[:] = -1.0
    at = np.zeros(stages, np.int32)
    now_ms = np.zeros(stages)
    queued = np.ones(stages, np.bool_)
    queue = np.arange(stages + 1).astype(np.int32)
    first, waiting, done = 0, stages, 0
    while waiting > 0:
        stage = queue[first]
        first = (first + 1) % (stages + 1)
        waiting -= 1
        queued[stage] = False
        while at[stage] < width:
            action = order[stage, at[stage]]
            start_ms = now_ms[stage]
            awaited = graph.awaits[action]
            if awaited >= 0:
                if ended[awaited] < 0:
                    break
                start_ms = max(start_ms, ended[awaited] + graph.message_ms[action] * longer)
            now_ms[stage] = ended[action] = start_ms + takes_ms[action]
            sequence[done] = action
            done += 1
            at[stage] += 1
            given = graph.gives[action]
            if given >= 0:
                other = graph.stage[given]
                if other != stage and not queued[other] and at[other] < width and order[other, at[other]] == given:
                    queued[other] = True
                    queue[(first + waiting) % (stages + 1)] = other
                    waiting += 1
    return now_ms.max() if done == stages * width else NEVER
