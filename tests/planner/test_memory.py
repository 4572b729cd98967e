"""Predicted peaks are those of the schedule that is carried out."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenpipe.planner.grouped import Candidate, GroupedSchedule
from evenpipe.planner.memory import StageMemory, peak_bytes, unit_bytes
from evenpipe.schedule import Action, Programs, Size, Spec, lower
from evenpipe.simulate import Costs, simulate
from tests.schedules import build

STAGES, GROUPS, BATCHES = st.integers(2, 6), st.integers(1, 5), st.integers(1, 70)


def saved_bytes(units: list[int], candidate: Candidate, bpipe: bool = False) -> tuple[int, ...]:
    return GroupedSchedule(Programs("kfkb", bpipe), len(units)).saved_bytes(units, candidate)


def _simulated(units: list[int], k: int, m: int, bpipe: bool) -> tuple[int, ...]:
    stages = len(units)
    program = lower(build("kfkb", stages, m, bpipe=bpipe, group_size=k))
    costs = Costs(tuple(range(1, stages + 1)), (0.5,) * stages)
    return tuple(stage.peak_bytes for stage in simulate(program, costs, [(unit,) for unit in units]).stages)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), GROUPS, BATCHES)
def test_peaks_in_closed_form_are_the_simulator_s(units: list[int], k: int, m: int) -> None:
    assert saved_bytes(units, Candidate(k, 1, m)) == _simulated(units, k, m, bpipe=False)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=6), GROUPS, st.integers(1, 150))
@example([100, 90], 4, 28)  # in which evictions took long to settle
def test_with_bpipe_a_long_batch_peaks_as_the_shorter_one_that_is_simulated(units: list[int], k: int, m: int) -> None:
    assert saved_bytes(units, Candidate(k, 1, m), bpipe=True) == _simulated(units, k, m, bpipe=True)


@pytest.mark.parametrize("bpipe", [False, True])
@given(STAGES, GROUPS, BATCHES)
def test_as_many_messages_are_under_way_as_the_program_says(bpipe: bool, p: int, k: int, m: int) -> None:
    program = lower(build("kfkb", p, m, bpipe=bpipe, group_size=k))
    counted = []
    for steps in program.steps:
        posted, sent, most = set(), set(), 0
        for step in steps:
            posted.update(step.post)
            sent.difference_update(step.complete)
            # Every receive is there until its compute ends, an activation even longer, but then as a saved one.
            sent.update([step.send] if step.send else [])
            most = max(most, len(posted) + len(sent))
            posted.difference_update(step.complete)
            posted.update(step.then_post)
        counted.append(most)
    most_by_any_clock = GroupedSchedule(Programs("kfkb", bpipe), p).messages_at_once(Candidate(k, 1, m))
    predicted = tuple(most - k for most in most_by_any_clock)
    assert all(most - 1 <= found <= most + 1 for most, found in zip(counted, predicted, strict=True))
    assert m >= k * (p + 1) or predicted == tuple(counted)


def test_what_stays_is_added_and_messages_count_by_the_sample() -> None:
    stages = [StageMemory(1000, 100, 10, 3, 7), StageMemory(2000, 0, 20, 5, 7)]
    assert unit_bytes(stages[1], 4) == 20 + 4 * 5
    # Two live on stage 0, one on stage 1. Two activations and a gradient are under way at once on both, and by another
    # clock one more.
    peaks = peak_bytes(stages, Candidate(1, 4, 8), GroupedSchedule(Programs("kfkb"), 2))
    assert peaks == (1000 + 100 + 2 * 22 + 4 * 4 * 7, 2000 + 40 + 4 * 4 * 7)


def test_a_stage_holds_the_weight_of_what_it_accepted() -> None:
    """p = 4, m = 8: stage 0 keeps 3 of its 4, stage 3 one of its own and 2 of stage 0's, while one is on its way."""
    heavy = saved_bytes([1000, 1, 1, 10], Candidate(1, 1, 8), bpipe=True)
    assert heavy[0] == 3000
    assert heavy[3] == 2 * 1000 + 10


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=4), GROUPS, st.integers(1, 20))
def test_a_schedule_that_the_planner_does_not_know_is_weighed_by_its_programs(units: list[int], k: int, m: int) -> None:
    """GPipe in groups of k, each of them its own flush."""

    def order(size: Size) -> list[list[Action]]:
        k, m = size.group_size, size.micro_batches
        row = [Action(kind, i) for g in range(0, m, k) for kind in "FB" for i in range(g, min(g + k, m))]
        return [row] * size.stages

    flushed = Spec("flushed", "", order, bound=lambda size: size.group_size, needs=frozenset(["groups"]))
    schedule = GroupedSchedule(Programs(flushed), len(units))
    memory = [StageMemory(7, 3, 0, unit, 0) for unit in units]
    assert peak_bytes(memory, Candidate(k, 1, m), schedule) == tuple(10 + min(k, m) * unit for unit in units)
