"""What stages need for micro-batches of any size is a line through the sizes that were measured."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.planner.grouped import average_ms
from evenpipe.planner.memory import Measured, StageMemory, growth, stage_memory, stage_times, unit_bytes

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
