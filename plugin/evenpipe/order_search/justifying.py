"""Justification of an order, to the front and to the back: each action goes into the first gap that holds it.

What is done to project schedules under scarce resources (Valls, Ballestín and Quintanilla, European Journal of
Operational Research 165, 2005). No round makes an order longer, or lets a stage hold more.
"""

from __future__ import annotations

import numpy as np

from evenpipe.order_search.clock import NEVER, ends
from evenpipe.order_search.compiled import compiled
from evenpipe.order_search.problem import Graph, Numbers, Order, Problem

__all__ = ["justified", "pushed_back"]


def justified(problem: Problem, order: Order, rounds: int = 4) -> Order:
    """Return ``order`` after so many rounds, each to the back and then to the front."""
    graph, takes_ms = problem.graph, problem.takes_ms
    back = _mirrored(graph)
    for _ in range(rounds):
        turned = _justify(_turned(order), takes_ms[::-1].copy(), back)
        order = _justify(_turned(turned), takes_ms, graph)
    return order


def pushed_back(problem: Problem, order: Order, slots: Numbers) -> Order:
    """Return ``order`` with each action as late as possible, the last first by ``slots`` (one per action).

    Every action takes one slot and a message none. No stage holds more than in ``order``.
    """
    graph = problem.graph._replace(cap=problem.peak_bytes(order), message_ms=np.zeros(order.size))
    units = graph.parts.size * graph.micro_batches
    made = np.empty_like(order)
    _place(made, np.argsort(-slots[::-1], kind="stable"), np.ones(order.size), _mirrored(graph), units)
    return _turned(made)


def _turned(order: Order) -> Order:
    """The order in which time goes back: the last action is number 0."""
    turned: Order = np.ascontiguousarray(order.size - 1 - order[:, ::-1])
    return turned


def _mirrored(graph: Graph) -> Graph:
    """The graph in which time goes back: what awaited gives, what was saved is freed."""
    last = len(graph.stage) - 1

    def of(numbers: Numbers) -> Numbers:
        turned: Numbers = np.where(numbers >= 0, last - numbers, -1).astype(np.int32)[::-1].copy()
        return turned

    given_ms = np.where(graph.gives >= 0, graph.message_ms[graph.gives], 0.0)
    return graph._replace(
        stage=graph.stage[::-1].copy(),
        awaits=of(graph.gives),
        gives=of(graph.awaits),
        message_ms=given_ms[::-1].copy(),
        change=-graph.change[::-1],
    )


def _justify(order: Order, takes_ms: Numbers, graph: Graph) -> Order:
    ended, sequence = np.empty(len(takes_ms)), np.empty(len(takes_ms), np.int32)
    if ends(order, takes_ms, graph, 1.0, ended, sequence) >= NEVER:
        return order
    by_start = sequence[np.argsort(_starts(order, graph, ended)[sequence], kind="stable")]
    units = graph.parts.size * graph.micro_batches
    made = np.empty_like(order)
    _place(made, by_start, takes_ms, graph, units)
    return made


def _starts(order: Order, graph: Graph, ended: Numbers) -> Numbers:
    """When each action starts: exactly when the last of what it waits for is there, also where that takes no time."""
    there_ms = np.where(graph.awaits >= 0, ended[graph.awaits] + graph.message_ms, 0.0)
    before_ms = np.zeros(len(ended))
    before_ms[order[:, 1:]] = ended[order[:, :-1]]
    starts: Numbers = np.maximum(there_ms, before_ms)
    return starts


@compiled
def _place(order: Order, actions: Numbers, takes_ms: Numbers, graph: Graph, units: int) -> None:
    """Fill ``order`` with ``actions`` in their turn, each where it starts first."""
    stages, width = order.shape
    filled = np.zeros(stages, np.int32)
    held = np.zeros((stages, width))
    ended = np.zeros(len(takes_ms))
    last = np.full((len(takes_ms) // units, stages), -1, np.int64)
    for action in actions:
        stage = graph.stage[action]
        ready_ms = 0.0
        if graph.awaits[action] >= 0:
            ready_ms = ended[graph.awaits[action]] + graph.message_ms[action]
        if action >= units:  # its unit's pass before it
            ready_ms = max(ready_ms, ended[action - units])
        if action % graph.micro_batches > 0:  # the micro-batch before it
            ready_ms = max(ready_ms, ended[action - 1])
        if graph.shared and last[action // units, stage] >= 0:  # all of its kind before it
            ready_ms = max(ready_ms, ended[last[action // units, stage]])
        last[action // units, stage] = action
        count = filled[stage]
        place = count
        while place > 0:  # as far to the front as what it waits for and the cap allow
            level = held[stage, place - 2] if place > 1 else 0.0
            if ended[order[stage, place - 1]] <= ready_ms or level + graph.change[action] > graph.cap[stage]:
                break
            place -= 1
        while place < count:  # and from there into the first gap that is long enough
            free_ms = ended[order[stage, place - 1]] if place > 0 else 0.0
            after = order[stage, place]
            if max(ready_ms, free_ms) + takes_ms[action] <= ended[after] - takes_ms[after] + 1e-9:
                break
            place += 1
        start_ms = max(ready_ms, ended[order[stage, place - 1]]) if place > 0 else ready_ms
        for at in range(count, place, -1):
            order[stage, at] = order[stage, at - 1]
            held[stage, at] = held[stage, at - 1] + graph.change[action]
        order[stage, place] = action
        held[stage, place] = (held[stage, place - 1] if place > 0 else 0.0) + graph.change[action]
        ended[action] = start_ms + takes_ms[action]
        filled[stage] = count + 1
