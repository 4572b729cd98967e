"""Orders on the clock: when each action ends, how long each has behind it, and a quick estimate of a changed order.

A message is there so long after what makes it. In the simulator it also waits until its receive is posted and until its
link is free; there a batch takes as long or longer.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from evenpipe.schedule.search.compiled import compiled
from evenpipe.schedule.search.problem import Graph, Numbers, Order, Problem

__all__ = ["NEVER", "ends", "makespan", "tails", "through_window"]

#: The time of an order that deadlocks, or takes longer than was asked for.
NEVER: Final = 1e18


def makespan(problem: Problem, order: Order, takes_ms: Numbers | None = None) -> float:
    """Return the milliseconds of an order; NEVER if it deadlocks. ``takes_ms``: other times than the problem's."""
    takes_ms = problem.takes_ms if takes_ms is None else takes_ms
    ended, sequence = np.empty(len(takes_ms)), np.empty(len(takes_ms), np.int32)
    work_ms = np.bincount(problem.graph.stage, takes_ms, len(order))
    return float(ends(order, takes_ms, problem.graph, NEVER, work_ms, ended, sequence))


@compiled
def ends(
    order: Order,
    takes_ms: Numbers,
    graph: Graph,
    most_ms: float,
    work_ms: Numbers,
    ended: Numbers,
    sequence: Numbers,
) -> float:
    """Return when all actions have ended; NEVER for a deadlock, or as soon as it is known to be after ``most_ms``.

    ``ended`` gets the end of each action, ``sequence`` the actions such that each comes after what it waits for.
    Every stage goes as far as it can; who makes what another stage waits for next puts that one into the queue.
    """
    stages, width = order.shape
    ended[:] = -1.0
    at = np.zeros(stages, np.int32)
    now_ms = np.zeros(stages)
    left_ms = work_ms.copy()
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
                there_ms = ended[awaited] + graph.message_ms[action]
                if there_ms > start_ms:
                    start_ms = there_ms
                    if start_ms + left_ms[stage] > most_ms:
                        return NEVER
            now_ms[stage] = ended[action] = start_ms + takes_ms[action]
            left_ms[stage] -= takes_ms[action]
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
    if done < stages * width:
        return NEVER
    last_ms = now_ms.max()
    return last_ms if last_ms <= most_ms else NEVER


@compiled
def tails(order: Order, takes_ms: Numbers, graph: Graph, place: Numbers, sequence: Numbers, tail_ms: Numbers) -> None:
    """Set, per action, the longest path from its start to the end of all, its own time included.

    ``place``: of each action in its stage's row; ``sequence``: as :func:`ends` left it.
    """
    width = order.shape[1]
    for number in range(len(sequence) - 1, -1, -1):
        action = sequence[number]
        longest_ms = 0.0
        if place[action] + 1 < width:
            longest_ms = tail_ms[order[graph.stage[action], place[action] + 1]]
        given = graph.gives[action]
        if given >= 0:
            longest_ms = max(longest_ms, graph.message_ms[given] + tail_ms[given])
        tail_ms[action] = longest_ms + takes_ms[action]


@compiled
def through_window(
    order: Order,
    stage: int,
    low: int,
    high: int,
    takes_ms: Numbers,
    graph: Graph,
    ended: Numbers,
    tail_ms: Numbers,
    head_ms: Numbers,
) -> float:
    """Return an estimate of the longest path through the places low to high of a stage's changed row.

    What comes before and after the window is taken as it was (Taillard's estimate, European Journal of Operational
    Research 64, 1993). ``head_ms`` is room for a row.
    """
    now_ms = ended[order[stage, low - 1]] if low > 0 else 0.0
    for at in range(low, high + 1):
        action = order[stage, at]
        awaited = graph.awaits[action]
        if awaited >= 0 and graph.stage[awaited] != stage:
            now_ms = max(now_ms, ended[awaited] + graph.message_ms[action])
        head_ms[at] = now_ms
        now_ms += takes_ms[action]
    behind_ms = tail_ms[order[stage, high + 1]] if high + 1 < order.shape[1] else 0.0
    longest_ms = 0.0
    for at in range(high, low - 1, -1):
        action = order[stage, at]
        given = graph.gives[action]
        if given >= 0 and graph.stage[given] != stage:
            behind_ms = max(behind_ms, graph.message_ms[given] + tail_ms[given])
        behind_ms += takes_ms[action]
        longest_ms = max(longest_ms, head_ms[at] + behind_ms)
    return longest_ms
