"""Simulated annealing over the stages' orders: one action at a time is moved within its stage's row.

What breaks a cap, or is estimated to be refused, is never put on the clock. The objective is the mean over samples of
the actions' times, of which there may be one: an order that is tuned to exact times loses where they are not met.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from evenpipe.schedule.search.clock import NEVER, ends, tails, through_window
from evenpipe.schedule.search.compiled import compiled
from evenpipe.schedule.search.problem import Graph, Numbers, Order, Problem

__all__ = ["Cooling", "anneal"]


#: How often a move is of an action on the critical path.
_CRITICAL: Final = 0.3


class Cooling(NamedTuple):
    """A chain: temperatures at its start and end, in mean times of an action, and how far a move goes on average."""

    hot: float = 0.05
    cold: float = 0.0003
    reach: float = 2.5


def anneal(
    problem: Problem, order: Order, moves: int, seed: int, cooling: Cooling, samples_ms: Numbers | None = None
) -> tuple[Order, float]:
    """Return the best order found within so many moves of ``order``, which fits, and its mean milliseconds.

    samples_ms: samples × actions, the times of which the mean counts; the problem's own, if left out.
    The same arguments give the same order.
    """
    samples_ms = problem.takes_ms[None] if samples_ms is None else samples_ms
    unit_ms = float(problem.takes_ms.mean()) or 1.0
    found = order.copy()
    best_ms = _anneal(
        found,
        np.ascontiguousarray(samples_ms),
        problem.graph,
        moves,
        seed,
        cooling._replace(hot=cooling.hot * unit_ms, cold=cooling.cold * unit_ms),
    )
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
def _move(order: Order, place: Numbers, stage: int, start: int, end: int) -> None:
    action = order[stage, start]
    step = 1 if end > start else -1
    for at in range(start, end, step):
        order[stage, at] = order[stage, at + step]
        place[order[stage, at]] = at
    order[stage, end] = action
    place[action] = end


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
def _anneal(
    best: Order,
    samples_ms: Numbers,
    graph: Graph,
    moves: int,
    seed: int,
    cooling: Cooling,
) -> float:
    """Change ``best``; ``cooling`` has temperatures in milliseconds."""
    np.random.seed(seed)
    stages, width = best.shape
    samples, actions = samples_ms.shape
    units = actions // (width // (graph.parts.shape[1] * graph.micro_batches))
    order = best.copy()
    place = np.empty(actions, np.int32)
    held = np.empty((stages, width))
    for stage in range(stages):
        now = 0.0
        for at in range(width):
            place[order[stage, at]] = at
            now += graph.change[order[stage, at]]
            held[stage, at] = now
    work_ms = np.zeros((samples, stages))
    for sample in range(samples):
        for action in range(actions):
            work_ms[sample, graph.stage[action]] += samples_ms[sample, action]
    ended, tail_ms = np.empty((samples, actions)), np.empty((samples, actions))
    sequence = np.empty((samples, actions), np.int32)
    new_ended, new_sequence = np.empty_like(ended), np.empty_like(sequence)
    takes, new_takes, head_ms = np.empty(samples), np.empty(samples), np.empty(width)
    current_ms = 0.0
    for sample in range(samples):
        takes[sample] = ends(order, samples_ms[sample], graph, NEVER, work_ms[sample], ended[sample], sequence[sample])
        if takes[sample] >= NEVER:
            return NEVER
        tails(order, samples_ms[sample], graph, place, sequence[sample], tail_ms[sample])
        current_ms += takes[sample] / samples
    best_ms = current_ms
    for move in range(moves):
        temperature = cooling.hot * (cooling.cold / cooling.hot) ** (move / moves)
        stage, start = np.random.randint(stages), np.random.randint(width)
        if np.random.random() < _CRITICAL:
            sample = np.random.randint(samples)
            for _ in range(12):
                action = order[stage, start]
                path_ms = ended[sample, action] - samples_ms[sample, action] + tail_ms[sample, action]
                if path_ms >= takes[sample] - 1e-9:
                    break
                stage, start = np.random.randint(stages), np.random.randint(width)
        far = 1 + int(-math.log(np.random.random() + 1e-12) * cooling.reach)
        end = start + far if np.random.random() < 0.5 else start - far
        if end < 0 or end >= width or not _may_move(order, stage, start, end, graph, units):
            continue
        action = order[stage, start]
        low, high = min(start, end), max(start, end)
        _move(order, place, stage, start, end)
        if not _holds(order, stage, low, high, graph, held):
            _move(order, place, stage, end, start)
            continue
        most_ms = current_ms - temperature * math.log(np.random.random() + 1e-12)
        estimate_ms = 0.0
        for sample in range(samples):
            path_ms = through_window(
                order, stage, low, high, samples_ms[sample], graph, ended[sample], tail_ms[sample], head_ms
            )
            # Where the action was on no critical path, what takes longest is elsewhere and stays.
            before_ms = ended[sample, action] - samples_ms[sample, action] + tail_ms[sample, action]
            if before_ms < takes[sample] - 1e-9:
                path_ms = max(path_ms, takes[sample])
            estimate_ms += path_ms / samples
        if estimate_ms > most_ms + 1e-9:
            _move(order, place, stage, end, start)
            continue
        new_ms = 0.0
        for sample in range(samples):
            left_ms = (most_ms - new_ms) * samples
            for other in range(sample + 1, samples):
                left_ms -= work_ms[other].max()  # none is faster
            new_takes[sample] = ends(
                order,
                samples_ms[sample],
                graph,
                left_ms + 1e-9,
                work_ms[sample],
                new_ended[sample],
                new_sequence[sample],
            )
            if new_takes[sample] >= NEVER:
                new_ms = NEVER
                break
            new_ms += new_takes[sample] / samples
        if new_ms > most_ms + 1e-9:
            _move(order, place, stage, end, start)
            continue
        ended, new_ended = new_ended, ended
        sequence, new_sequence = new_sequence, sequence
        takes, new_takes = new_takes, takes
        for sample in range(samples):
            tails(order, samples_ms[sample], graph, place, sequence[sample], tail_ms[sample])
        now = held[stage, low - 1] if low > 0 else 0.0
        for at in range(low, high + 1):
            now += graph.change[order[stage, at]]
            held[stage, at] = now
        current_ms = new_ms
        if current_ms < best_ms - 1e-12:
            best_ms = current_ms
            best[:] = order
    return best_ms
