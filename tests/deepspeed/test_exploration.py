"""Which micro-batch sizes are measured before a run is tuned: none that does not fit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepspeed")

from evenpipe.deepspeed.adaptive.exploration import Explored, explore
from evenpipe.deepspeed.adaptive.measured import Measured
from evenpipe.planner import Candidate, PlanError, StageMemory, StageTimes
from evenpipe.tuner.conditions import Conditions
from evenpipe.tuner.tuner import Tuner

STATIC, SHARED, FIXED, BY_SAMPLE, MESSAGE = 1000, 50, 30, 100, 10


def measured(size: int) -> Measured:
    """Of two stages."""
    times = (float(size), 2.0 * size)
    each = float(FIXED + size * BY_SAMPLE)
    return Measured(times, times, (each, each), (SHARED, 0.0), (size * MESSAGE,) * 2, (STATIC,) * 2)


def asked(limit_bytes: int, sizes: tuple[int, ...] = (1, 2, 4, 8), state: Any = None) -> tuple[list[int], Explored]:
    """The sizes that are asked for, in order, and what comes of them."""
    exploration = explore(8, sizes, False, limit_bytes, 5, lambda conditions: state)
    order = [next(exploration)]
    while True:
        try:
            order.append(exploration.send(measured(order[-1])))
        except StopIteration as done:
            return order, done.value


def test_the_two_smallest_sizes_tell_what_grows_with_samples() -> None:
    _, explored = asked(10**6)
    one = StageMemory(STATIC, SHARED, FIXED, BY_SAMPLE, MESSAGE)
    assert explored.conditions == Conditions(8, False, 10**6, (one, one._replace(shared_bytes=0)))


def test_what_candidates_need_is_measured_and_nothing_else() -> None:
    order, explored = asked(10**6)
    assert order == [1, 2, 4, 8]
    assert explored.tuner.candidates[:2] == (Candidate(1, 8, 1), Candidate(2, 4, 2))
    # Two micro-batches of two samples fit on the first stage, and not two of four.
    few = STATIC + SHARED + 2 * (FIXED + 2 * BY_SAMPLE) + 8 * 2 * MESSAGE
    order, explored = asked(few)
    assert order == [1, 2]
    assert {candidate.b for candidate in explored.tuner.candidates} <= {1, 2}
    assert explored.tuner._times[2] == StageTimes((2.0, 4.0), (2.0, 4.0))


def test_a_size_that_does_not_fit_is_not_tried() -> None:
    least = STATIC + SHARED + 2 * (FIXED + BY_SAMPLE) + 8 * MESSAGE
    order, explored = asked(least)
    assert order == [1]
    assert {candidate.b for candidate in explored.tuner.candidates} == {1}


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match="no micro-batch size fits: stage 0 needs"):
        asked(STATIC)


def test_one_size_that_is_given_is_the_only_one() -> None:
    order, explored = asked(10**6, sizes=(2,))
    assert order == [2]
    assert [(candidate.k, candidate.b) for candidate in explored.tuner.candidates] == [(k, 2) for k in (1, 2, 3, 4)]


def test_a_tuner_that_is_gone_on_with_needs_no_times() -> None:
    going_on = Tuner((Candidate(2, 8, 1),), 2, False, {}, 5)
    order, explored = asked(10**6, state=going_on)
    assert order == [1, 2]
    assert explored.tuner is going_on
