"""Change an order by one action, and what follows: only actions whose times change are put on the clock again.

The times are those of several samples at once, as columns. Actions have a sequence, in which each comes after what it
waits for; a move changes the piece of it between the ends of what the action passes (Pearce and Kelly's dynamic
topological sort, ACM Journal of Experimental Algorithmics 11, 2006).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from evenpipe.order_search.clock import NEVER, ends
from evenpipe.order_search.compiled import compiled
from evenpipe.order_search.problem import Graph, Numbers, Order

__all__ = ["Clocked", "clocked", "estimate", "follow", "move", "reach", "restore", "settle"]


class Clocked(NamedTuple):
    """An order on the clock, whose arrays change with it.

    Per action: ``place`` in its stage's row, ``turn`` in the ``sequence``; with a column a sample, how long it takes,
    when it has ``ended`` and the longest path from its start to the end of all (``tail_ms``). Both have one row more,
    of zeros, for no action. ``longer``: how much longer messages take, per sample. ``held``: bytes, per place.

    The rest is room to work in: marked actions, a piece of a sequence, and the actions that have changed with their
    former ends.
    """

    order: Order
    place: Numbers
    sequence: Numbers
    turn: Numbers
    held: Numbers
    takes_ms: Numbers
    longer: Numbers
    ended: Numbers
    tail_ms: Numbers
    marked: Numbers
    piece: Numbers
    changed: Numbers
    former_ms: Numbers


def clocked(order: Order, samples_ms: Numbers, longer: Numbers, graph: Graph) -> Clocked | None:
    """Return ``order`` on the clock, for samples × actions of times; None if it deadlocks."""
    samples, actions = samples_ms.shape
    ended, tail_ms = np.zeros((actions + 1, samples)), np.zeros((actions + 1, samples))
    sequence, of_sample = np.empty(actions, np.int32), np.empty(actions)
    for sample in reversed(range(samples)):
        if ends(order, samples_ms[sample], graph, longer[sample], of_sample, sequence) >= NEVER:
            return None
        ended[:-1, sample] = of_sample
    sequence = sequence[np.argsort(of_sample[sequence], kind="stable")]
    place, turn = np.empty(actions, np.int32), np.empty(actions, np.int32)
    place[order] = np.arange(order.shape[1])
    turn[sequence] = np.arange(actions)
    held = np.cumsum(graph.change[order], axis=1)
    takes_ms = np.ascontiguousarray(samples_ms.T)
    state = Clocked(
        order=order,
        place=place,
        sequence=sequence,
        turn=turn,
        held=held,
        takes_ms=takes_ms,
        longer=longer,
        ended=ended,
        tail_ms=tail_ms,
        marked=np.ones(actions, np.bool_),
        piece=np.empty(actions, np.int32),
        changed=np.empty(actions, np.int32),
        former_ms=np.empty((actions, samples)),
    )
    _tails(state, graph, actions - 1, actions)
    return state


@compiled
def move(state: Clocked, stage: int, start: int, end: int) -> None:
    """Move the action at a place of a stage's row to another place."""
    order, place = state.order, state.place
    action = order[stage, start]
    step = 1 if end > start else -1
    for at in range(start, end, step):
        order[stage, at] = order[stage, at + step]
        place[order[stage, at]] = at
    order[stage, end] = action
    place[action] = end


@compiled
def estimate(state: Clocked, graph: Graph, stage: int, low: int, high: int, room_ms: Numbers, takes: Numbers) -> None:
    """Set ``takes`` to an estimate of the longest path through the places low to high of a row that has changed.

    What comes before and after the window is taken as it was (Taillard's estimate, European Journal of Operational
    Research 64, 1993). ``room_ms``: two rows, and one for each place of the window.
    """
    order, ended, tail_ms, longer = state.order, state.ended, state.tail_ms, state.longer
    samples, last = len(longer), len(ended) - 1
    before = order[stage, low - 1] if low > 0 else last
    behind = order[stage, high + 1] if high + 1 < order.shape[1] else last
    now_ms, behind_ms = room_ms[0], room_ms[1]
    for sample in range(samples):
        now_ms[sample] = ended[before, sample]
        behind_ms[sample] = tail_ms[behind, sample]
        takes[sample] = 0.0
    for at in range(low, high + 1):
        action = order[stage, at]
        awaited = graph.awaits[action]
        head_ms = room_ms[2 + at - low]
        if awaited >= 0 and graph.stage[awaited] != stage:
            for sample in range(samples):
                now_ms[sample] = max(now_ms[sample], ended[awaited, sample] + graph.message_ms[action] * longer[sample])
        for sample in range(samples):
            head_ms[sample] = now_ms[sample]
            now_ms[sample] += state.takes_ms[action, sample]
    for at in range(high, low - 1, -1):
        action = order[stage, at]
        given = graph.gives[action]
        head_ms = room_ms[2 + at - low]
        if given >= 0 and graph.stage[given] != stage:
            for sample in range(samples):
                there_ms = graph.message_ms[given] * longer[sample] + tail_ms[given, sample]
                behind_ms[sample] = max(behind_ms[sample], there_ms)
        for sample in range(samples):
            behind_ms[sample] += state.takes_ms[action, sample]
            takes[sample] = max(takes[sample], head_ms[sample] + behind_ms[sample])


@compiled
def follow(state: Clocked, graph: Graph, stage: int, start: int, end: int) -> tuple[int, int]:
    """Bring the sequence behind a move: what it changes lies between the turns returned; (−1, −1) for a deadlock.

    ``piece`` keeps that part of the sequence as it was.
    """
    order, place, sequence, turn, late = state.order, state.place, state.sequence, state.turn, state.marked
    action = order[stage, end]
    forth = end > start
    step = 1 if forth else -1
    first, last = turn[action], turn[order[stage, end - step]]
    width, count = order.shape[1], 0
    deadlock = False
    # What comes after the action (before it, if it moves to the front) has to go with it.
    for number in range(first, last + step, step):
        one = sequence[number]
        of = graph.stage[one]
        goes = one == action
        if not goes:
            linked = graph.awaits[one] if forth else graph.gives[one]
            beside = place[one] - step
            goes = (linked >= 0 and late[linked]) or (0 <= beside < width and late[order[of, beside]])
            if goes and of == stage:
                deadlock = True
                break
        if goes:
            late[one] = True
            state.changed[count] = one
            count += 1
    if not deadlock:
        at = first
        for number in range(first, last + step, step):
            one = sequence[number]
            state.piece[number] = one
            if not late[one]:
                sequence[at] = one
                turn[one] = at
                at += step
        for number in range(count):
            one = state.changed[number]
            sequence[at] = one
            turn[one] = at
            at += step
    for number in range(count):
        late[state.changed[number]] = False
    if deadlock:
        return -1, -1
    return min(first, last), max(first, last)


@compiled
def reach(state: Clocked, graph: Graph, stage: int, low: int, high: int, first: int, takes: Numbers) -> int:
    """Put on the clock again what follows the window, from the turn ``first``; return how many actions have changed.

    ``takes`` gets how long all takes.
    """
    order, place, ended, marked, longer = state.order, state.place, state.ended, state.marked, state.longer
    width, samples, none = order.shape[1], len(longer), len(ended) - 1
    waiting = 0
    for at in range(low, min(high + 2, width)):
        marked[order[stage, at]] = True
        waiting += 1
    number, count = first, 0
    while waiting > 0:
        action = state.sequence[number]
        number += 1
        if not marked[action]:
            continue
        marked[action] = False
        waiting -= 1
        of = graph.stage[action]
        before = order[of, place[action] - 1] if place[action] > 0 else none
        awaited = graph.awaits[action] if graph.awaits[action] >= 0 else none
        message_ms = graph.message_ms[action]
        former_ms = state.former_ms[count]
        differs = False
        for sample in range(samples):
            there_ms = ended[awaited, sample] + message_ms * longer[sample]
            end_ms = max(there_ms, ended[before, sample]) + state.takes_ms[action, sample]
            former_ms[sample] = ended[action, sample]
            differs |= end_ms != former_ms[sample]
            ended[action, sample] = end_ms
        if not differs:
            continue
        state.changed[count] = action
        count += 1
        if place[action] + 1 < width:
            behind = order[of, place[action] + 1]
            waiting += not marked[behind]
            marked[behind] = True
        given = graph.gives[action]
        if given >= 0:
            waiting += not marked[given]
            marked[given] = True
    takes[:] = 0.0
    for other in range(len(order)):
        for sample in range(samples):
            takes[sample] = max(takes[sample], ended[order[other, width - 1], sample])
    return count


@compiled
def restore(state: Clocked, first: int, last: int, count: int) -> None:
    """Put back the sequence from the turns ``first`` to ``last``, and the ends of ``count`` actions."""
    for number in range(first, last + 1):
        state.sequence[number] = state.piece[number]
        state.turn[state.piece[number]] = number
    for number in range(count):
        state.ended[state.changed[number]] = state.former_ms[number]


@compiled
def settle(state: Clocked, graph: Graph, stage: int, low: int, high: int, last: int) -> None:
    """Set what is held and what lies behind actions, after a move that stays."""
    held = state.held[stage]
    now = held[low - 1] if low > 0 else 0.0
    for at in range(low, high + 1):
        now += graph.change[state.order[stage, at]]
        held[at] = now
    waiting = 0
    for at in range(max(low - 1, 0), high + 1):
        state.marked[state.order[stage, at]] = True
        waiting += 1
    _tails(state, graph, last, waiting)


@compiled
def _tails(state: Clocked, graph: Graph, number: int, waiting: int) -> None:
    """Set the tails of so many marked actions, and of all that these change, from the turn ``number`` to the front."""
    order, place, tail_ms, marked, longer = state.order, state.place, state.tail_ms, state.marked, state.longer
    width, samples, none = order.shape[1], len(longer), len(tail_ms) - 1
    while waiting > 0:
        action = state.sequence[number]
        number -= 1
        if not marked[action]:
            continue
        marked[action] = False
        waiting -= 1
        of = graph.stage[action]
        behind = order[of, place[action] + 1] if place[action] + 1 < width else none
        given, message_ms = none, 0.0
        if graph.gives[action] >= 0:
            given = graph.gives[action]
            message_ms = graph.message_ms[given]
        differs = False
        for sample in range(samples):
            there_ms = message_ms * longer[sample] + tail_ms[given, sample]
            long_ms = max(there_ms, tail_ms[behind, sample]) + state.takes_ms[action, sample]
            differs |= long_ms != tail_ms[action, sample]
            tail_ms[action, sample] = long_ms
        if not differs:
            continue
        if place[action] > 0:
            before = order[of, place[action] - 1]
            waiting += not marked[before]
            marked[before] = True
        awaited = graph.awaits[action]
        if awaited >= 0:
            waiting += not marked[awaited]
            marked[awaited] = True
