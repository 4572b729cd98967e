"""Which micro-batch sizes are measured before a run is tuned: none that does not fit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from evenpipe.schedule import Programs
from evenpipe.tuner.group_memory import Measured, PlanError, StageMemory, stage_memory
from evenpipe.tuner.grouped import Candidate, GroupedSchedule, StageTimes
from evenpipe.tuner.loop import Conditions, Explored, explore
from evenpipe.tuner.tuner import Tuner

STATIC, SHARED, FIXED, BY_SAMPLE, MESSAGE, WORKSPACE = 1000, 50, 30, 100, 10, 5


SCHEDULE = GroupedSchedule(Programs("kfkb"), 2)


def measured(size: int) -> tuple[Measured, Measured]:
    """Of two stages."""
    each = float(FIXED + size * BY_SAMPLE)
    first = Measured(size, size, each, SHARED, size * MESSAGE, size * WORKSPACE, STATIC)
    return first, first._replace(forward_ms=2 * size, backward_ms=2 * size, shared_bytes=0)


def asked(
    limit_bytes: int, sizes: tuple[int, ...] = (1, 2, 4, 8), state: Any = None, alone: bool = False
) -> tuple[list[int], Explored]:
    """The sizes that are asked for, in order, and what comes of them."""
    exploration = explore(SCHEDULE, 8, sizes, limit_bytes, 5, lambda conditions: state, alone)
    order = [next(exploration)]
    while True:
        try:
            order.append(exploration.send(measured(order[-1])))
        except StopIteration as done:
            return order, done.value


def test_the_two_smallest_sizes_tell_what_grows_with_samples() -> None:
    _, explored = asked(10**6)
    one = StageMemory(STATIC, SHARED, FIXED, BY_SAMPLE, MESSAGE, WORKSPACE)
    assert explored.conditions == Conditions(SCHEDULE, 8, 10**6, (one, one._replace(shared_bytes=0)))


def test_what_candidates_need_is_measured_and_nothing_else() -> None:
    order, explored = asked(10**6)
    assert order == [1, 2, 4, 8]
    assert explored.tuner.candidates[:2] == (Candidate(1, 8, 1), Candidate(2, 4, 2))
    # Two micro-batches of two samples fit on the first stage, and not two of four.
    few = STATIC + SHARED + 2 * (FIXED + 2 * BY_SAMPLE) + 8 * 2 * MESSAGE + 2 * WORKSPACE
    order, explored = asked(few)
    assert order == [1, 2]
    assert {candidate.b for candidate in explored.tuner.candidates} <= {1, 2}
    assert explored.tuner._times[2] == StageTimes((2.0, 4.0), (2.0, 4.0))


def test_a_size_that_does_not_fit_is_not_tried() -> None:
    least = STATIC + SHARED + 2 * (FIXED + BY_SAMPLE) + 8 * MESSAGE + WORKSPACE
    order, explored = asked(least)
    assert order == [1]
    assert {candidate.b for candidate in explored.tuner.candidates} == {1}


def test_alone_a_larger_size_is_measured_that_no_batch_may_fit_in() -> None:
    """One micro-batch of two samples is held then, and nothing that a neighbour sends."""
    twice = 2 * (FIXED + BY_SAMPLE)  # as if all of it grew with samples
    batch = STATIC + SHARED + 2 * twice + 4 * 2 * MESSAGE + 2 * WORKSPACE
    for alone, enough in ((False, batch), (True, STATIC + twice)):
        with contextlib.suppress(PlanError):
            assert asked(enough - 1, sizes=(1, 2), alone=alone)[0] == [1]
        exploration = explore(SCHEDULE, 8, (1, 2), enough, 5, lambda conditions: None, alone)
        assert [next(exploration), exploration.send(measured(1))] == [1, 2]


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match="no micro-batch size fits: stage 0 needs"):
        asked(STATIC)


def test_one_size_that_is_given_is_the_only_one() -> None:
    order, explored = asked(10**6, sizes=(2,))
    assert order == [2]
    assert [(candidate.k, candidate.b) for candidate in explored.tuner.candidates] == [(k, 2) for k in (1, 2, 3, 4)]


def test_a_tuner_that_is_gone_on_with_needs_no_times() -> None:
    memory = StageMemory(STATIC, SHARED, FIXED, BY_SAMPLE, MESSAGE, WORKSPACE)
    going_on = Explored(Conditions(SCHEDULE, 8, 10**6, (memory,) * 2), Tuner(SCHEDULE, (Candidate(2, 8, 1),), {}, 5))
    order, explored = asked(10**6, state=going_on)
    assert order == [1, 2]
    assert explored is going_on


def test_what_no_longer_fits_is_no_candidate() -> None:
    """Of micro-batches that differ, one comes late that is larger than all before."""
    limit_bytes = STATIC + SHARED + 16 * (FIXED + BY_SAMPLE)
    _, explored = asked(limit_bytes, sizes=(1,))
    ks = [candidate.k for candidate in explored.tuner.candidates]
    assert ks == list(range(1, len(ks) + 1))
    assert len(ks) > 2
    same, said = explored.grown(explored.conditions.memory)
    assert (same, said) == (explored, "")

    def needing(each: int) -> tuple[Explored, str]:
        _, explored = asked(limit_bytes, sizes=(1,))
        explored.tuner.adopt(0, explored.tuner.candidates[-1], [1.0] * len(ks), 5)
        first = stage_memory(Measured(0, 0, each, 0, MESSAGE, 0, 0), 1)
        return explored.grown((first, StageMemory(0, 0, 0, 0, 0)))

    larger, said = needing(2 * (FIXED + BY_SAMPLE))
    most = larger.tuner.candidates[-1].k
    assert larger.tuner.candidates == larger.conditions.fitting((1,))
    assert 1 <= most < ks[-1]
    assert said == f"groups of more than {most} no longer fit"
    assert larger.conditions.memory[1] == explored.conditions.memory[1]
    assert [candidate.k for candidate in larger.tuner.used] == [ks[-1]]
    assert larger.tuner.due(1)
    assert larger.tuner.decide(5)[0] in larger.tuner.candidates
    # A run that trains goes on.
    largest, said = needing(limit_bytes)
    assert largest.tuner.candidates == (Candidate(1, 1, 8),)
    assert said.startswith("no micro-batch size fits: stage 0 needs")
