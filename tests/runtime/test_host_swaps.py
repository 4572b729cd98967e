"""Which storages leave for the host, and the limit that says how much does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.runtime.host_swaps import HostLimit
from evenpipe.runtime.movable import largest_within, least_that_frees
from evenpipe.schedule import Size, Unit, build
from evenpipe.schedule.swap_room import Saved

SIZES = st.lists(st.integers(1, 100), max_size=12)
ROW = build("1f1b", Size(4, 8), swaps="gaining").schedule.actions[0]


class Storage(SimpleNamespace):
    """Has a size, and is itself alone."""

    nbytes: int
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


@given(SIZES, st.integers(0, 1000))
def test_the_least_that_frees_so_many_bytes_has_no_storage_too_many(sizes: list[int], wanted: int) -> None:
    sealed: list[Any] = [Storage(nbytes=size) for size in sizes]
    freed = sum(saved.nbytes for saved in least_that_frees(sealed, wanted))
    within = sum(saved.nbytes for saved in largest_within(sealed, wanted))
    assert freed >= min(wanted, sum(sizes))
    assert within <= wanted
    assert freed == within or freed - wanted < min(
        saved.nbytes for saved in sealed if saved not in largest_within(sealed, wanted)
    )


def test_more_leaves_of_larger_micro_batches_and_a_limit_that_cannot_be_kept_is_known() -> None:
    limit = HostLimit()
    limit.begin(ROW)
    # Until the limit is known, all that can leave does.
    assert [limit.leaving(Unit(at), 100, 90) for at in range(2)] == [100, 100]
    limit.limit_bytes = 300.0
    limit.begin(ROW)
    assert limit.leaving(Unit(2), 100, 90) == pytest.approx(50)
    assert limit.leaving(Unit(3), 120, 110) == pytest.approx(120 * 0.75)  # of 120, of which 2 are whole and 2 keep 30
    assert not limit.is_exceeded
    assert limit.leaving(Unit(4), 160, 150) == 160
    assert limit.is_exceeded


def test_a_stage_that_swaps_nothing_watches_its_limit() -> None:
    limit = HostLimit()
    limit.limit_bytes = 450.0
    limit.begin(build("1f1b", Size(4, 8)).schedule.actions[0])
    for at in range(4):
        limit.leaving(Unit(at), 110, None)
    assert not limit.is_exceeded
    limit.leaving(Unit(4), 120, None)  # of which the stage holds four
    assert limit.is_exceeded


def test_a_batch_that_swaps_nothing_forgets_not_what_can_leave_in_one_that_does() -> None:
    limit = HostLimit()
    limit.limit_bytes, limit.saved = 300.0, {0: Saved(100, 10, 100)}
    limit.begin(build("1f1b", Size(4, 2)).schedule.actions[0])
    for at in range(2):
        limit.leaving(Unit(at), 100, None)
    limit.begin(ROW)
    assert limit.share == pytest.approx(0.5)
    assert not limit.is_exceeded
