"""Predicted peaks are those of the schedule that is carried out; stages grow as measured; sizes fit under the curve."""

from __future__ import annotations

import re
import time
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenpipe.schedule import Action, Programs, Size, Spec, lower, reordered
from evenpipe.simulate import Costs, simulate
from evenpipe.tuner.group_memory import (
    Measured,
    PlanError,
    StageMemory,
    candidates,
    growth,
    peak_bytes,
    stage_memory,
    stage_times,
    unit_bytes,
)
from evenpipe.tuner.grouped import Candidate, GroupedSchedule, StageTimes, average_ms, estimate_ms
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


BYTES, SIZES = st.integers(0, 10**9), st.integers(1, 64)
SMALL = Measured(1.0, 2.0, 230, 50, 24, 12, 1000)


def test_one_size_is_taken_to_grow_in_proportion() -> None:
    assert stage_memory(SMALL, 2) == StageMemory(1000, 50, 0, 115, 12, 6)
    assert stage_memory(SMALL, 3).sample_bytes == 77, "rounded up"


def test_two_sizes_tell_what_does_not_grow() -> None:
    assert stage_memory(SMALL, 2, SMALL._replace(each_bytes=430), 4) == StageMemory(1000, 50, 30, 100, 12, 6)


@given(BYTES, BYTES, SIZES, st.integers(1, 64))
def test_the_line_goes_through_both(fixed: int, sample: int, few: int, more: int) -> None:
    assert growth(fixed + few * sample, few, fixed + (few + more) * sample, few + more) == (fixed, sample)


@given(BYTES, BYTES, SIZES, st.integers(1, 64))
def test_no_less_is_predicted_than_was_measured(few_bytes: int, grown: int, few: int, more: int) -> None:
    measured = (few, few_bytes), (few + more, few_bytes + grown)
    fixed, sample = growth(few_bytes, few, few_bytes + grown, few + more)
    for size, nbytes in measured:
        assert unit_bytes(StageMemory(0, 0, fixed, sample, 0), size) >= nbytes


def test_stage_times_are_those_of_all_stages() -> None:
    assert stage_times([SMALL, SMALL._replace(backward_ms=3.0)]) == ((1.0, 1.0), (2.0, 3.0))


@given(st.lists(st.floats(0.1, 1e4), min_size=1), st.floats(0, 1e6))
def test_one_that_was_held_up_does_not_count_among_times_that_are_averaged(usual: list[float], longer: float) -> None:
    assert average_ms([max(usual) + longer, *usual]) == pytest.approx(fmean(usual))


GIB = 2**30
EVEN = (StageMemory(100, 0, 0, 10, 0),) * 4  # stage 0 peaks at 100 + 10·b·min(4k, m)


FOUR = GroupedSchedule(Programs("kfkb"), 4)


def _names(found: tuple[Candidate, ...]) -> list[str]:
    return [candidate.name for candidate in found]


def test_each_group_size_has_its_largest_micro_batch() -> None:
    """Stage 0 keeps 4k micro-batches, or all of them."""
    assert _names(candidates(EVEN, 16, 100 + 10 * 15, FOUR)) == ["k1b2", "k2b1", "k3b1"]
    assert _names(candidates(EVEN, 16, 100 + 10 * 7, FOUR)) == ["k1b1"]


def test_where_the_whole_batch_fits_there_is_no_grouping_that_does_not() -> None:
    found = candidates(EVEN, 16, 100 + 10 * 16, FOUR)
    assert _names(found) == [
        "k1b16",
        "k2b8",
        "k3b4",
        "k4b4",
        *(f"k{k}b2" for k in range(5, 9)),
        *(f"k{k}b1" for k in range(9, 17)),
    ]
    assert _names(candidates(EVEN, 16, 100 + 10 * 16, FOUR, sizes=[2, 4])) == [
        "k1b4",
        "k2b4",
        "k3b4",
        "k4b4",
        *(f"k{k}b2" for k in range(5, 9)),
    ]


def test_a_group_is_never_larger_than_the_batch() -> None:
    found = candidates(EVEN, 4, GIB, FOUR)
    assert _names(found) == ["k1b4", "k2b2", "k3b1", "k4b1"]
    assert all(candidate.m * candidate.b == 4 for candidate in found)


@given(
    st.lists(st.builds(StageMemory, *[st.integers(0, 50)] * 5), min_size=2, max_size=5),
    st.integers(1, 24),
    st.integers(1, 3000),
    st.booleans(),
)
def test_candidates_are_the_curve(memory: list[StageMemory], samples: int, limit: int, bpipe: bool) -> None:
    schedule = GroupedSchedule(Programs("kfkb", bpipe), len(memory))
    try:
        found = candidates(memory, samples, limit, schedule)
    except PlanError:
        found = ()
    assert [candidate.k for candidate in found] == list(range(1, len(found) + 1))
    assert all(max(peak_bytes(memory, candidate, schedule)) <= limit for candidate in found)
    sizes = [candidate.b for candidate in found]
    assert sizes == sorted(sizes, reverse=True)
    if bpipe:
        return
    # Whatever else fits has the k of a candidate and a smaller b.
    for b in range(1, samples + 1):
        for k in range(1, samples // b + 1):
            if samples % b == 0 and max(peak_bytes(memory, Candidate(k, b, samples // b), schedule)) <= limit:
                assert found[k - 1].b >= b


@pytest.mark.parametrize("bpipe", [False, pytest.param(True, marks=pytest.mark.long)])
@given(st.integers(1, 10**12), st.integers(0, 10**9), st.sampled_from([1, 6, 12]))
def test_the_memory_asked_for_is_enough(bpipe: bool, static: int, sample: int, samples: int) -> None:
    memory = (StageMemory(static, 0, 5, sample, 1), StageMemory(static // 2, 0, 0, 2 * sample, 1))
    schedule = GroupedSchedule(Programs("kfkb", bpipe), 2)
    with pytest.raises(PlanError) as error:
        candidates(memory, samples, 0, schedule)
    assert "\n" not in str(error.value)
    [asked] = re.findall(r"give at least ([\d.]+) GiB", str(error.value))
    found = candidates(memory, samples, int(float(asked) * GIB), schedule)
    assert found
    with pytest.raises(PlanError):
        candidates(memory, samples, int(float(asked) * GIB * 0.998), schedule)


def test_sizes_divide_the_batch() -> None:
    with pytest.raises(PlanError, match="micro-batches of 3 samples: do not divide the 8 of a batch"):
        candidates(EVEN, 8, GIB, FOUR, sizes=[1, 3])


@pytest.mark.parametrize(("bpipe", "stages", "seconds"), [(False, 64, 5), (True, 16, 30)])
def test_a_large_batch_takes_seconds(bpipe: bool, stages: int, seconds: float) -> None:
    memory = (StageMemory(0, 0, 0, 10, 1),) * stages
    began = time.process_time()
    found = candidates(memory, 1536, 10 * stages * 4, GroupedSchedule(Programs("kfkb", bpipe), stages))
    assert found[0].b > found[-1].b
    assert time.process_time() - began < seconds


def test_a_candidate_is_ordered_by_whichever_order_takes_least():
    """p = 8, m = 24, 2F2B with BPipe, messages of half a forward: put off, they are several per cent faster."""
    schedule, candidate = GroupedSchedule(Programs("kfkb", bpipe=True), 8), Candidate(2, 1, 24)
    times = StageTimes((10.0,) * 8, (20.0,) * 8)
    message_ms = dict.fromkeys(schedule.program(candidate).links, 5.0)
    found, ms = schedule.ordered(candidate, times, message_ms)
    assumed = reordered(schedule.program(candidate), None)
    assert ms == estimate_ms(found, times, message_ms)
    assert ms < 0.98 * estimate_ms(assumed, times, message_ms)
    # What is kept is weighed anew like any other.
    schedule.keep(candidate, found)
    assert schedule.ordered(candidate, times, message_ms)[1] == ms
    assert reordered(schedule.program(candidate), None, "many") == assumed
