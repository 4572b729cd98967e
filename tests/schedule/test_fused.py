"""Backwards that are computed together with the forward before them: in steady parts, and nothing waits for ever."""

import sys
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import BACKWARD, COMPUTE, FORWARD, Queues, ScheduleError, Size, find, fused_form, lower
from evenpipe.schedule import build as build_program
from tests.schedule.deadlock import blocking_calls, stuck
from tests.schedules import build

kinds = st.sampled_from(get_args(Queues))


def fused(name, size, bpipe=False, queues="many"):
    return build_program(fused_form(find(name), size.chunks), size, bpipe, queues)


@given(st.integers(2, 6), st.integers(2, 3), st.integers(1, 4), st.booleans(), kinds)
def test_interleaved_stages_wait_for_nothing_that_does_not_come(p, v, batches, bpipe, queues):
    program = fused("interleaved", Size(p, p * batches, v), bpipe, queues)
    assert stuck([blocking_calls(steps, p) for steps in program.steps]) == []


@given(st.integers(1, 6), st.integers(1, 20), kinds)
def test_nor_do_stages_of_a_v(p, m, queues):
    program = fused("dualpipev", Size(p, m, 2), queues=queues)
    assert stuck([blocking_calls(steps, p) for steps in program.steps]) == []


@pytest.mark.parametrize(
    ("name", "size", "together"),
    [
        ("interleaved", Size(4, 16, 4), [44, 46, 48, 51]),  # of 64 − 20, − 18, − 16, − 14 backwards that may be
        ("interleaved", Size(4, 16, 2), [20, 22, 24, 27]),
        ("dualpipev", Size(4, 16, 2), [17, 20, 21, 23]),
    ],
)
def test_they_are_most_of_the_steady_part(name, size, together):
    program = fused(name, size)
    assert [sum(step.fused is not None for step in row) for row in program.steps] == together
    for row in program.steps:
        for step, following in pairwise(row):
            if step.fused is not None:
                assert (step.action.kind, following.action.kind) == (FORWARD, BACKWARD)
                assert step.fused.action == following.action
                assert following.takes is None


def test_fewer_pairs_are_left_beside_evictions_and_loads():
    program = fused("interleaved", Size(4, 16, 2), bpipe=True)
    assert [sum(step.fused is not None for step in row) for row in program.steps] == [17, 22, 24, 23]
    assert max(program.schedule.peak_live) == 4 * 2 + 2


def test_a_stage_holds_one_unit_more_than_otherwise():
    plain, other = build("interleaved", 4, 16, 2), fused("interleaved", Size(4, 16, 2)).schedule
    assert [after - before for before, after in zip(plain.peak_live, other.peak_live, strict=True)] == [1] * 4


def test_backwards_of_a_v_are_whole():
    assert {action.kind for row in fused("dualpipev", Size(4, 16, 2)).schedule.actions for action in row} < set(COMPUTE)
    assert "W" not in str(fused("dualpipev", Size(4, 16, 2)).schedule)


def test_a_backward_whose_gradient_comes_later_than_the_forward_begins_is_refused(monkeypatch):
    """As a defect, where it is said that all of them can be computed together."""

    def every(order, stage):
        rows = order.wiring.schedule.table.of(stage)
        kinds = order.wiring.schedule.table.kind[rows].tolist()
        pairs = zip(range(rows.start + 1, rows.stop), kinds, kinds[1:], strict=False)
        return frozenset(number for number, one, other in pairs if (one, other) == (ord(FORWARD), ord(BACKWARD)))

    monkeypatch.setattr(sys.modules["evenpipe.schedule.lower"], "fusable", every)
    with pytest.raises(ScheduleError, match="waits for what is not under way: this is a defect"):
        list(lower(build("1f1b", 4, 8), fused=True).steps)


@pytest.mark.parametrize("name", ["zbv", "2bw", "kfkb", "gpipe", "zb-h1"])
def test_others_have_no_such_order_and_say_which_do(name):
    with pytest.raises(ScheduleError, match="computed together: choose one of interleaved, dualpipev"):
        fused_form(find(name), 2)
