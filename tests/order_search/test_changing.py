"""Orders that change by one action: on the clock they are as from anew, and undone they are what they were."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.order_search.annealing import Cooling, anneal
from evenpipe.order_search.changing import Clocked, clocked, follow, move, reach, restore, settle
from evenpipe.order_search.clock import makespan
from evenpipe.order_search.costs import Part
from evenpipe.order_search.listing import listed
from evenpipe.order_search.problem import Problem
from evenpipe.order_search.search import Errors
from evenpipe.schedule import loop, vee
from evenpipe.schedule.topology import Places

PLACES = st.sampled_from([loop(3), loop(2, 2), vee(2), vee(3)])


def problem_of(places: Places, micro_batches: int, seed: int) -> Problem:
    """Parts of which some passes take no time, and messages."""
    chance = random.Random(seed)
    parts = [
        Part(forward_ms=1, input_gradient_ms=chance.choice([0, 1.3]), weight_gradient_ms=chance.uniform(0, 1))
        for _ in places.order
    ]
    return Problem(places, micro_batches, parts, [99] * places.stages, chance.uniform(0, 0.3))


def same(state: Clocked, other: Clocked) -> bool:
    names = ("order", "place", "held", "ended", "tail_ms")
    return all(np.array_equal(getattr(state, name), getattr(other, name)) for name in names)


@given(PLACES, st.integers(1, 6), st.integers(1, 3), st.integers(0, 999))
def test_moves_are_clocked_as_from_anew_and_can_be_undone(
    places: Places, micro_batches: int, count: int, seed: int
) -> None:
    problem, chance = problem_of(places, micro_batches, seed), random.Random(seed)
    graph, samples = problem.graph, Errors().samples(problem, count, seed)

    def anew(state: Clocked) -> Clocked | None:
        return clocked(state.order.copy(), *samples, graph)

    state = clocked(listed(problem)[-1].copy(), *samples, graph)
    assert state is not None
    takes, width = np.empty(count), state.order.shape[1]
    for _ in range(12):
        stage, start, end = chance.randrange(places.stages), chance.randrange(width), chance.randrange(width)
        row = state.order[stage, min(start, end) : max(start, end) + 1]
        if start == end or np.isin(graph.awaits[row], row).any():  # what one waits for on its own stage is not passed
            continue
        low, high = min(start, end), max(start, end)
        before = anew(state)
        move(state, stage, start, end)
        first, last = follow(state, graph, stage, start, end)
        assert (first < 0) == (anew(state) is None)
        if first >= 0:
            changed = reach(state, graph, stage, low, high, first, takes)
            expected = [makespan(problem, state.order, *one) for one in zip(*samples, strict=True)]
            assert takes.tolist() == expected
            if chance.random() < 0.7:
                settle(state, graph, stage, low, high, last)
                before = anew(state)
            else:
                restore(state, first, last, changed)
                move(state, stage, end, start)
        else:
            move(state, stage, end, start)
        assert before is not None
        assert same(state, before)
        assert (state.sequence[state.turn] == np.arange(len(state.turn))).all()
        assert not state.marked.any()


def test_an_order_is_annealed_for_the_mean_of_its_samples() -> None:
    problem = problem_of(vee(3), 6, 1)
    samples = Errors().samples(problem, 5, 0)
    order = listed(problem)[0]
    found, mean_ms = anneal(problem, order, 300, 0, Cooling(), samples)

    def mean_of(one: np.typing.NDArray[np.int32]) -> float:
        return float(np.mean([makespan(problem, one, *sample) for sample in zip(*samples, strict=True)]))

    assert abs(mean_of(found) - mean_ms) < 1e-9
    assert mean_ms < mean_of(order)
