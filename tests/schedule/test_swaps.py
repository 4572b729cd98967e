"""The pass that swaps: out after the forward, in before the backward, beside BPipe without moving anything twice."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import (
    GAINING,
    ScheduleError,
    Size,
    awaited_swaps,
    build,
    check_offers,
    choose,
    find,
    most_whole,
    needs_of,
    own,
    with_swaps,
)
from tests.schedule.independent import fault


def drawn(program) -> list[str]:
    return [" ".join(map(str, row)) for row in program.schedule.actions]


def test_what_is_swapped_comes_back_beside_the_forward_before_its_backward() -> None:
    assert drawn(build("1f1b", Size(2, 4), swaps=(0, 1))) == [
        "F0 O0 I0 F1 O1 B0 I1 F2 O2 B1 I2 F3 O3 B2 I3 B3",
        "F0 O0 I0 B0 F1 O1 I1 B1 F2 O2 I2 B2 F3 O3 I3 B3",
    ]


def test_only_the_parts_that_are_named_swap() -> None:
    program = build("interleaved", Size(2, 2, 2), swaps=(3,))
    assert drawn(program)[0] == drawn(build("interleaved", Size(2, 2, 2)))[0]
    assert re.findall(r"[OI]\S+", drawn(program)[1]) == ["O0.1", "I0.1", "O1.1", "I1.1"]


def test_what_is_evicted_leaves_its_swapped_tensors_on_its_own_host() -> None:
    program = build("1f1b", Size(4, 8), bpipe=True, swaps=range(4))
    assert sum(program.schedule.evictions) > 0
    for row in program.schedule.actions:
        of_unit = defaultdict(str)
        for action in row:
            if action.evictor < 0:
                of_unit[action.unit] += action.kind
        assert set(of_unit.values()) <= {"FOIB", "FOELB"}


@given(st.data())
def test_any_schedule_swaps_any_of_its_parts(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in own() if "chunks" not in find(name).needs]))
    stages, batches = data.draw(st.integers(1, 4)), 2 if "stream" in find(name).needs else 1
    size = Size(stages, data.draw(st.integers(stages, 6)), batches=batches)
    bpipe = find(name).balanced is not None and stages > 1 and data.draw(st.booleans())
    plain = build(name, size, bpipe).schedule
    swaps = data.draw(st.sets(st.integers(0, len(plain.places.order) - 1)))
    swapped = build(name, size, bpipe, swaps=swaps).schedule
    assert fault(swapped) is None
    assert ("swap" in needs_of(swapped)) == bool(swaps)
    assert swapped.peak_live == plain.peak_live
    for one, other in zip(plain.actions, swapped.actions, strict=True):
        assert [action for action in other if action.kind not in "OI"] == list(one)
    assert with_swaps(plain, ()) == plain


def test_units_that_gain_swap_and_come_back_where_there_is_room() -> None:
    """Two units are whole at most: at B4 the first stage has units 4 and 7, so that 5 waits for 7 to be gone."""
    program = build("1f1b", Size(4, 8), swaps=GAINING)
    assert drawn(program) == [
        "F0 O0 F1 O1 F2 O2 I0 F3 O3 B0 I1 F4 O4 B1 I2 F5 O5 B2 I3 F6 O6 B3 I4 F7 O7 B4 I5 I6 B5 I7 B6 B7",
        "F0 F1 O1 F2 O2 B0 I1 F3 O3 B1 I2 F4 O4 B2 I3 F5 O5 B3 I4 F6 O6 B4 I5 F7 B5 I6 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]
    assert [most_whole(row) for row in program.schedule.actions] == [2, 2, 2, 1]
    first = program.schedule.actions[0]
    assert [f"{first[at]} waits for {first[out]}" for at, outs in awaited_swaps(first).items() for out in outs] == [
        *("F2 waits for O0", "I0 waits for O1", "F3 waits for O2", "F4 waits for O3", "F5 waits for O4"),
        *("F6 waits for O5", "F7 waits for O6", "I6 waits for O7"),
    ]


@given(st.data())
def test_what_gains_in_any_schedule(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(own()))
    spec = find(name)
    chunks = 2 if "chunks" in spec.needs else 1
    stages, batches = data.draw(st.integers(2, 4)), 2 if "stream" in spec.needs else 1
    size = Size(stages, stages * data.draw(st.integers(1, 3)), chunks, batches=batches)
    bpipe = spec.balanced is not None and stages > 1 and data.draw(st.booleans())
    plain, swapped = (build(name, size, bpipe, swaps=swaps).schedule for swaps in ((), GAINING))
    assert fault(swapped) is None
    assert swapped.peak_live == plain.peak_live
    for one, other in zip(plain.actions, swapped.actions, strict=True):
        assert [action for action in other if action.kind not in "OI"] == list(one)
        assert most_whole(other) <= most_whole(one)
        swaps = [action.unit for action in other if action.kind == "O"]
        waits = [other[out].unit for outs in awaited_swaps(other).values() for out in outs]
        assert len(waits) == len(set(waits))
        assert set(waits) <= set(swaps)


def test_a_table_swaps_what_gains(tmp_path) -> None:
    path = tmp_path / "table"
    plain, swapped = (build("1f1b", Size(4, 8), swaps=swaps).schedule for swaps in ((), GAINING))
    path.write_text(str(plain))
    assert build(choose(f"file:{path}"), Size(4, 8), swaps=GAINING).schedule.actions == swapped.actions
    path.write_text(str(swapped))
    spec = choose(f"file:{path}")
    assert build(spec, Size(4, 8), swaps=GAINING).schedule.actions == swapped.actions
    with pytest.raises(ScheduleError, match="leave swaps out"):
        build(spec, Size(4, 8), swaps=(0,))
    with pytest.raises(ScheduleError, match="swaps to hosts what can leave: have the run swap, a share of 1"):
        check_offers(spec, frozenset(), "a toy")
    check_offers(spec, frozenset(), "a toy", swap=1.0)


def test_a_part_that_the_model_does_not_have() -> None:
    with pytest.raises(ScheduleError, match="swaps=2: the model has parts 0 to 1"):
        build("1f1b", Size(2, 2), swaps=(0, 2))


def test_a_table_is_run_as_it_is(tmp_path) -> None:
    path = tmp_path / "table"
    path.write_text(str(build("1f1b", Size(2, 2)).schedule))
    with pytest.raises(ScheduleError, match="leave swaps out"):
        build(choose(f"file:{path}"), Size(2, 2), swaps=(0,))


def test_the_name_in_a_file_steers_no_terminal(tmp_path):
    path = tmp_path / "S.txt"
    path.write_text(str(build("1f1b", Size(2, 2)).schedule).replace("name=1f1b", "name=1f\x1b[31m1b"))
    assert choose(f"file:{path}").table.name == "1f[31m1b"
