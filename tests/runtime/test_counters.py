"""Memory counters: peaks are of the sum, and are exact."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.runtime.memory import MemoryCounter, MemorySnapshot


def test_a_peak_is_of_the_sum_not_the_sum_of_peaks() -> None:
    counter = MemoryCounter()
    counter.add_own(100)
    counter.note_peak()
    counter.add_own(-90)
    counter.add_accepted(50)
    assert counter.snapshot() == MemorySnapshot(10, 50, 0, 0, peak_bytes=100, peak_units=0, evicted_bytes=0)


def test_what_is_saved_and_dropped_before_a_forward_ends_is_no_peak() -> None:
    counter = MemoryCounter()
    counter.add_own(100)
    counter.add_own(-90)
    counter.note_peak()
    assert counter.peak_bytes == 10


def test_units_count_own_and_accepted_together() -> None:
    counter = MemoryCounter()
    counter.add_own_units(2)
    counter.add_accepted_units(1)
    counter.add_own_units(-2)
    assert (counter.own_units, counter.accepted_units, counter.peak_units) == (0, 1, 3)


def test_a_new_period_starts_from_what_is_live() -> None:
    counter = MemoryCounter()
    counter.add_own(100)
    counter.add_own(-60)
    counter.add_own_units(3)
    counter.add_own_units(-2)
    counter.add_evicted(60)
    counter.reset_peak()
    assert counter.snapshot() == MemorySnapshot(40, 0, 1, 0, peak_bytes=40, peak_units=1, evicted_bytes=0)


def test_a_snapshot_does_not_change() -> None:
    snapshot = MemoryCounter().snapshot()
    with pytest.raises(FrozenInstanceError):
        snapshot.own_bytes = 1  # type: ignore[misc]


@given(st.lists(st.tuples(st.booleans(), st.integers(-1000, 1000))))
def test_the_peak_is_the_largest_sum_ever_reached(changes: list[tuple[bool, int]]) -> None:
    counter, total, largest = MemoryCounter(), 0, 0
    for own, nbytes in changes:
        (counter.add_own if own else counter.add_accepted)(nbytes)
        counter.note_peak()
        total += nbytes
        largest = max(largest, total)
    assert counter.peak_bytes == largest
