"""Simulated annealing over the stages' orders: one action at a time is moved within its stage's row.

What breaks a cap, or is estimated to be refused, is never put on the clock. The objective is the mean over samples of
times, of which there may be one: an order that is tuned to exact times loses where they are not met. An order that is
tuned to 8 samples still loses 3 % to ZB-V in one of 20 others (8 stages, 32 micro-batches); to 32, it gains there.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from evenpipe.order_search.changing import Clocked, clocked, estimate, follow, move, reach, restore, settle
from evenpipe.order_search.clock import NEVER
from evenpipe.order_search.compiled import compiled
from evenpipe.order_search.problem import Graph, Numbers, Order, Problem

__all__ = ["Cooling", "Samples", "anneal"]

#: How often a move is of an action on the critical path.
_CRITICAL: Final = 0.3


class Cooling(NamedTuple):
    """A chain: temperatures at its start and end, in mean times of an action, and how far a move goes on average."""

    hot: float = 0.05
    cold: float = 0.0003
    reach: float = 2.5


class Samples(NamedTuple):
    """Times that an order may meet: samples × actions, and how much longer messages take in each sample."""

    takes_ms: Numbers
    longer: Numbers


def anneal(
    problem: Problem, order: Order, moves: int, seed: int, cooling: Cooling, samples: Samples | None = None
) -> tuple[Order, float]:
    """Return the best order found within so many moves of ``order``, which fits, and its mean milliseconds.

    samples: the times of which the mean counts; the problem's own, if left out. The same arguments give the same order.
    """
    samples = Samples(problem.takes_ms[None], np.ones(1)) if samples is None else samples
    unit_ms = float(problem.takes_ms.mean()) or 1.0
    found = order.copy()
    state = clocked(order.copy(), samples.takes_ms, samples.longer, problem.graph)
    if state is None:
        return found, NEVER
    cooling = cooling._replace(hot=cooling.hot * unit_ms, cold=cooling.cold * unit_ms)
    best_ms = _anneal(found, state, problem.graph, moves, seed, cooling)
    return found, float(best_ms)


@compiled
def _may_move(order: Order, stage: int, start: int, end: int, graph: Graph, units: int) -> bool:
    """Return whether an action may pass all between: none of its kind and part, of its unit, or that it waits for."""
    action = order[stage, start]
    step = 1 if end > start else -1
    for at in range(start + step, end + step, step):
        other = order[stage, at]
        if other // graph.micro_batches == action // graph.micro_batches or other % units == action % units:
            return False
        if graph.shared and other // units == action // units < 2:
            return False
        if other == (graph.gives[action] if step > 0 else graph.awaits[action]):
            return False
    return True


@compiled
def _holds(order: Order, stage: int, low: int, high: int, graph: Graph, held: Numbers) -> bool:
    """Return whether the stage stays within its cap from place low to high."""
    now = held[stage, low - 1] if low > 0 else 0.0
    for at in range(low, high + 1):
        now += graph.change[order[stage, at]]
        if now > graph.cap[stage]:
            return False
    return True


@compiled
def _anneal(best: Order, state: Clocked, graph: Graph, moves: int, seed: int, cooling: Cooling) -> float:
    """Change ``best``; ``cooling`` has temperatures in milliseconds."""
    np.random.seed(seed)
    order, ended, tail_ms = state.order, state.ended, state.tail_ms
    stages, width = best.shape
    samples, actions = len(state.longer), len(state.place)
    units = actions // (width // (graph.parts.shape[1] * graph.micro_batches))
    takes, new_takes = np.zeros(samples), np.zeros(samples)
    for stage in range(stages):
        for sample in range(samples):
            takes[sample] = max(takes[sample], ended[order[stage, width - 1], sample])
    room_ms = np.empty((width + 2, samples))
    best_ms = current_ms = float(takes.mean())
    for number in range(moves):
        temperature = cooling.hot * (cooling.cold / cooling.hot) ** (number / moves)
        stage, start = np.random.randint(stages), np.random.randint(width)
        if np.random.random() < _CRITICAL:
            sample = np.random.randint(samples)
            for _ in range(12):
                action = order[stage, start]
                path_ms = ended[action, sample] - state.takes_ms[action, sample] + tail_ms[action, sample]
                if path_ms >= takes[sample] - 1e-9:
                    break
                stage, start = np.random.randint(stages), np.random.randint(width)
        far = 1 + int(-math.log(np.random.random() + 1e-12) * cooling.reach)
        end = start + far if np.random.random() < 0.5 else start - far
        if end < 0 or end >= width or not _may_move(order, stage, start, end, graph, units):
            continue
        action = order[stage, start]
        low, high = min(start, end), max(start, end)
        move(state, stage, start, end)
        if not _holds(order, stage, low, high, graph, state.held):
            move(state, stage, end, start)
            continue
        most_ms = current_ms - temperature * math.log(np.random.random() + 1e-12)
        estimate(state, graph, stage, low, high, room_ms, new_takes)
        for sample in range(samples):
            # Where the action was on no critical path, what takes longest is elsewhere and stays.
            before_ms = ended[action, sample] - state.takes_ms[action, sample] + tail_ms[action, sample]
            if before_ms < takes[sample] - 1e-9:
                new_takes[sample] = max(new_takes[sample], takes[sample])
        if new_takes.mean() > most_ms + 1e-9:
            move(state, stage, end, start)
            continue
        first, last = follow(state, graph, stage, start, end)
        if first < 0:
            move(state, stage, end, start)
            continue
        count = reach(state, graph, stage, low, high, first, new_takes)
        new_ms = float(new_takes.mean())
        if new_ms > most_ms + 1e-9:
            restore(state, first, last, count)
            move(state, stage, end, start)
            continue
        settle(state, graph, stage, low, high, last)
        takes[:] = new_takes
        current_ms = new_ms
        if current_ms < best_ms - 1e-12:
            best_ms = current_ms
            best[:] = order
    return best_ms
