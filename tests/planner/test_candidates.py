"""The memory-limit curve of Ada-Grouper's Figure 3."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.planner.grouped import Candidate, GroupedSchedule, StageTimes, estimate_ms
from evenpipe.planner.memory import PlanError, StageMemory, candidates, peak_bytes
from evenpipe.schedule import Programs, reordered

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


@settings(max_examples=50)
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
@settings(max_examples=40)
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
