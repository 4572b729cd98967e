"""List schedules: each stage takes what it can start first, by simple rules, under its cap."""

from __future__ import annotations

from itertools import product
from typing import Final, NamedTuple

import numpy as np

from evenpipe.order_search.clock import NEVER
from evenpipe.order_search.compiled import compiled
from evenpipe.order_search.problem import Graph, Numbers, Order, Problem

__all__ = ["listed"]

#: How long a stage waits rather than start a weight gradient, in mean times of an action.
_PATIENCE: Final = (0.0, 0.3, 0.6, 1.0)


class _Rules(NamedTuple):
    split: bool
    forwards_first: bool
    late_first: bool
    patience_ms: float


def listed(problem: Problem) -> list[Order]:
    """Return the orders of all rules that come to an end, and the one of one micro-batch after the other."""
    unit_ms, graph = float(problem.takes_ms.mean()), problem.graph
    width = len(problem.takes_ms) // problem.places.stages
    orders = [_one_by_one(problem)]
    for forwards_first, late_first, patience in product((False, True), (True, False), _PATIENCE):
        order = np.full((problem.places.stages, width), -1, np.int32)
        rules = _Rules(problem.split, forwards_first, late_first, patience * unit_ms)
        if _list(order, problem.takes_ms, graph, rules):
            orders.append(order)
    return orders


def _one_by_one(problem: Problem) -> Order:
    graph, count, positions = problem.graph, problem.micro_batches, len(problem.parts)
    rows = []
    for parts in graph.parts:
        backwards = [kind * positions + part for part in parts[::-1] for kind in range(1, len(problem.kinds))]
        of_unit = np.array([*parts, *backwards]) * count
        rows.append((np.arange(count)[:, None] + of_unit).ravel())
    return np.array(rows, np.int32)


@compiled
def _choice(
    stage: int,
    now_ms: float,
    held: float,
    done: Numbers,
    ended: Numbers,
    graph: Graph,
    rules: _Rules,
) -> tuple[int, float]:
    """Return what the stage starts next, as far as is known now, and when; −1 for nothing."""
    count, chunks = graph.micro_batches, graph.parts.shape[1]
    positions = graph.parts.size
    best, best_ms, weight = -1, NEVER, -1
    best_rank = NEVER
    grown = 0.0  # what one input gradient may leave more than was saved is kept free by forwards
    for chunk in range(chunks):
        grown = max(grown, graph.change[(positions + graph.parts[stage, chunk]) * count])
    for turn in range(chunks):
        position = graph.parts[stage, chunks - 1 - turn if rules.late_first else turn]
        for kind in range(2):
            number = done[kind, position]
            if number >= (count if kind == 0 else done[0, position]):
                continue
            action = (kind * positions + position) * count + number
            awaited = graph.awaits[action]
            if awaited >= 0 and ended[awaited] < 0:
                continue
            if kind == 0:
                # What later parts of this stage need to pass the same micro-batch on is kept free.
                beyond = 0.0
                for chunk in range(chunks):
                    other = graph.parts[stage, chunk]
                    if other > position:
                        beyond = max(beyond, graph.change[other * count])
                if held + graph.change[action] + beyond + grown > graph.cap[stage]:
                    continue
            elif held + graph.change[action] > graph.cap[stage]:
                continue
            start_ms = now_ms
            if awaited >= 0:
                start_ms = max(now_ms, ended[awaited] + graph.message_ms[action])
            preferred = (kind == 0) == rules.forwards_first
            rank = turn * 1e-4 + (0.0 if preferred else 0.5)
            if start_ms > now_ms + 1e-9:  # one of those for which it would have to wait: the first
                rank = 1000.0 + start_ms + turn * 1e-4 + (0.0 if preferred else 5e-4)
            if rank < best_rank:
                best_rank, best, best_ms = rank, action, start_ms
        if rules.split and weight < 0 and done[2, position] < done[1, position]:
            weight = (2 * positions + position) * count + done[2, position]
    if weight >= 0 and best_ms > now_ms + rules.patience_ms + 1e-9:
        return weight, now_ms
    return best, best_ms


@compiled
def _list(
    order: Order,
    takes_ms: Numbers,
    graph: Graph,
    rules: _Rules,
) -> bool:
    """Fill ``order``; False where no stage can go on."""
    stages, width = order.shape
    positions, count = graph.parts.size, graph.micro_batches
    ended = np.full(len(takes_ms), -1.0)
    done = np.zeros((3, positions), np.int32)
    now_ms, held = np.zeros(stages), np.zeros(stages)
    at = np.zeros(stages, np.int32)
    chosen, chosen_ms = np.full(stages, -1, np.int32), np.full(stages, NEVER)
    changed = np.ones(stages, np.bool_)
    for _ in range(stages * width):
        first = -1
        for stage in range(stages):
            if changed[stage]:
                changed[stage] = False
                chosen[stage], chosen_ms[stage] = _choice(stage, now_ms[stage], held[stage], done, ended, graph, rules)
            if chosen[stage] >= 0 and (first < 0 or chosen_ms[stage] < chosen_ms[first]):
                first = stage
        if first < 0:
            return False
        action = chosen[first]
        ended[action] = now_ms[first] = chosen_ms[first] + takes_ms[action]
        held[first] += graph.change[action]
        order[first, at[first]] = action
        at[first] += 1
        done[action // (positions * count), action // count % positions] += 1
        changed[first] = True
        if graph.gives[action] >= 0:
            changed[graph.stage[graph.gives[action]]] = True
    return True
