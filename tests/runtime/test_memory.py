"""What a stage holds: counters whose peaks are of the sum, and the acceptor's slots, reused without the allocator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from evenpipe.runtime.memory import ALIGNMENT, MemoryCounter, Slot, SlotPool, aligned_bytes


def test_a_peak_is_of_the_sum_not_the_sum_of_peaks() -> None:
    counter = MemoryCounter()
    counter.add_own(100)
    counter.note_peak()
    counter.add_own(-90)
    counter.add_accepted(50)
    assert counter == MemoryCounter(10, 50, 0, 0, peak_bytes=100, peak_units=0, evicted_bytes=0)


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
    counter.evicted_bytes += 60
    counter.reset_peak()
    assert counter == MemoryCounter(40, 0, 1, 0, peak_bytes=40, peak_units=1, evicted_bytes=0)


@given(st.lists(st.tuples(st.booleans(), st.integers(-1000, 1000))))
def test_the_peak_is_the_largest_sum_ever_reached(changes: list[tuple[bool, int]]) -> None:
    counter, total, largest = MemoryCounter(), 0, 0
    for own, nbytes in changes:
        (counter.add_own if own else counter.add_accepted)(nbytes)
        counter.note_peak()
        total += nbytes
        largest = max(largest, total)
    assert counter.peak_bytes == largest


SIZES = st.lists(st.integers(0, 3000), max_size=8)


class Allocations(TorchDispatchMode):
    """Counts the calls that make new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += func is torch.ops.aten.empty.memory_format
        return func(*args, **(kwargs or {}))


@given(SIZES)
def test_parts_have_the_sizes_asked_for_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    pool = SlotPool("cpu")
    slot = pool.acquire(aligned_bytes(sizes))
    parts = slot.parts(sizes)
    assert [part.numel() for part in parts] == sizes
    assert {part.dtype for part in parts} <= {torch.uint8}
    for i, part in enumerate(parts):
        part.fill_(i)
    assert all(bool((part == i).all()) for i, part in enumerate(parts))
    assert all((part.data_ptr() - slot.buffer.data_ptr()) % ALIGNMENT == 0 for part in parts if part.numel())
    again = slot.parts(sizes)
    assert [part.data_ptr() for part in again] == [part.data_ptr() for part in parts]


def test_parts_are_padded_to_the_alignment() -> None:
    assert aligned_bytes([1, 64, 65, 0, 7]) == 64 + 64 + 128 + 0 + 64


def test_steady_state_calls_no_allocator() -> None:
    """Two micro-batches accepted at a time, of sizes that alternate and need padding."""
    pool = SlotPool("cpu")
    sizes = [[1000, 30], [2000, 1], [10] * 5]

    def accept_a_few() -> None:
        held: list[Slot] = []
        for i in range(12):
            if len(held) == 2:
                pool.release(held.pop(0))
            slot = pool.acquire(aligned_bytes(sizes[i % 3]))
            slot.parts(sizes[i % 3])
            held.append(slot)
        for slot in held:
            pool.release(slot)

    with Allocations() as first:
        accept_a_few()
    with Allocations() as second:
        accept_a_few()
    assert first.calls > 0
    assert second.calls == 0


def test_reserved_slots_are_there_when_needed() -> None:
    pool = SlotPool("cpu")
    pool.reserve(3, 4096)
    assert pool.allocated_bytes == 3 * 4096
    with Allocations() as allocations:
        slots = [pool.acquire(4000) for _ in range(3)]
    assert allocations.calls == 0
    assert len({slot.buffer.data_ptr() for slot in slots}) == 3


def test_reserving_counts_what_is_there_and_replaces_what_is_too_small() -> None:
    pool = SlotPool("cpu")
    pool.reserve(2, 100)
    pool.reserve(2, 50)
    assert pool.allocated_bytes == 200
    pool.reserve(3, 1000)
    assert pool.allocated_bytes == 3000


def test_what_sizes_have_outgrown_is_not_kept_beside() -> None:
    pool = SlotPool("cpu")
    pool.reserve(2, 100)
    first = pool.acquire(100)
    pool.reserve(2, 1000)
    assert pool.allocated_bytes == 2100
    pool.release(first)
    with Allocations() as allocations:
        pool.reserve(2, 10)
        assert pool.allocated_bytes == 2000
        pool.reserve(1, 10)
        assert pool.allocated_bytes == 1000
    assert allocations.calls == 0


def test_a_slot_too_small_is_replaced_not_kept_beside() -> None:
    pool = SlotPool("cpu")
    pool.release(pool.acquire(100))
    pool.release(pool.acquire(1000))
    assert pool.allocated_bytes == 1000


def test_the_smallest_slot_that_fits_is_lent() -> None:
    pool = SlotPool("cpu")
    large, small = pool.acquire(1000), pool.acquire(100)
    pool.release(large)
    pool.release(small)
    assert pool.acquire(90) is small
    assert pool.acquire(90) is large


def test_accepted_bytes_are_what_was_asked_for_not_what_is_reserved() -> None:
    counter = MemoryCounter()
    pool = SlotPool("cpu", counter)
    pool.reserve(2, 4096)
    assert counter.accepted_bytes == 0
    slots = [pool.acquire(1000), pool.acquire(30)]
    assert (counter.accepted_bytes, counter.accepted_units, pool.in_use) == (1030, 2, 2)
    for slot in slots:
        pool.release(slot)
    assert (counter.accepted_bytes, counter.accepted_units, pool.in_use) == (0, 0, 0)
    assert (counter.peak_bytes, counter.peak_units) == (1030, 2)


def test_a_slot_is_released_once_and_where_it_came_from() -> None:
    pool = SlotPool("cpu")
    slot = pool.acquire(10)
    with pytest.raises(ValueError, match="not on loan from this pool"):
        SlotPool("cpu").release(slot)
    pool.release(slot)
    with pytest.raises(ValueError, match="not on loan from this pool"):
        pool.release(slot)
    with pytest.raises(ValueError, match="-1 bytes"):
        pool.acquire(-1)
