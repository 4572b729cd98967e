"""What a stage holds when a share of its micro-batches is on the host, and the least share that keeps to a limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import LEVELS, Size, build, find, own, swapping_at
from evenpipe.schedule.swap_room import Saved, SwapRoom

ROW = build("1f1b", Size(4, 8)).schedule.actions[0]


def rooms(row) -> list[SwapRoom]:
    return [SwapRoom(swapping_at(level, row)) for level in LEVELS]


def test_late_swaps_come_back_just_before_their_backward_and_leave_one_micro_batch_whole() -> None:
    rows = build("1f1b", Size(4, 6), swaps="late").schedule.actions
    assert [" ".join(map(str, row)) for row in rows] == [
        "F0 O0 F1 O1 F2 O2 F3 O3 I0 B0 F4 O4 I1 B1 F5 O5 I2 B2 I3 B3 I4 B4 I5 B5",
        "F0 O0 F1 O1 F2 O2 I0 B0 F3 O3 I1 B1 F4 O4 I2 B2 F5 O5 I3 B3 I4 B4 I5 B5",
        "F0 O0 F1 O1 I0 B0 F2 O2 I1 B1 F3 O3 I2 B2 F4 O4 I3 B3 F5 O5 I4 B4 I5 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_stages_of_zb_h1_that_would_hold_as_much_as_before_swap_nothing() -> None:
    rows = build("zb-h1", Size(4, 16), swaps="gaining").schedule.actions
    assert [any(action.kind == "O" for action in row) for row in rows] == [True, True, False, False]


def test_peaks_of_the_first_stage_of_1f1b_by_share() -> None:
    """Of four micro-batches two are whole at once beside compute, one where the stage waits."""
    saved = {0: Saved(100.0)}
    assert [room.peak_bytes(saved, 0.0) for room in rooms(ROW)] == [400, 400, 400]
    assert [room.peak_bytes(saved, 0.5) for room in rooms(ROW)] == [400, 300, 250]
    assert [room.peak_bytes(saved, 1.0) for room in rooms(ROW)] == [400, 200, 100]


def test_what_cannot_leave_and_what_is_saved_once_stays() -> None:
    room = rooms(ROW)[-1]
    assert room.peak_bytes({0: Saved(100.0, 30.0)}, 1.0) == 100 + 3 * 30
    assert room.peak_bytes({0: Saved(100.0, 30.0, first=150.0)}, 1.0) == 50 + 100 + 3 * 30
    assert room.least_share({0: Saved(100.0, 30.0)}, 189.0) is None
    assert room.least_share({0: Saved(100.0, 30.0)}, 190.0) == pytest.approx(0.7)
    assert room.least_share({0: Saved(100.0, 30.0)}, 400.0) == 0.0


@given(st.data())
def test_the_least_share_keeps_to_the_limit_and_no_smaller_one_does(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in own() if "stream" not in find(name).needs]))
    chunks = 2 if "chunks" in find(name).needs else 1
    stages = data.draw(st.integers(2, 4))
    schedule = build(name, Size(stages, stages * data.draw(st.integers(1, 3)), chunks)).schedule
    nbytes = st.integers(1, 1000)
    saved = {chunk: Saved(size := data.draw(nbytes), data.draw(st.integers(0, size))) for chunk in range(chunks)}
    room = SwapRoom(swapping_at(data.draw(st.sampled_from(LEVELS)), data.draw(st.sampled_from(schedule.actions))))
    whole, least = room.peak_bytes(saved, 0.0), room.peak_bytes(saved, 1.0)
    limit = data.draw(st.floats(0, 1.2 * whole))
    share = room.least_share(saved, limit)
    assert (share is None) == (limit < least)
    if share is not None:
        assert room.peak_bytes(saved, share) <= limit
        assert share == 0 or room.peak_bytes(saved, max(0.0, share - 1e-6)) > limit - 1e-9 * whole
