"""Builders give the orders that the papers draw and Megatron runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.schedule import FORWARD, Schedule, ScheduleError, Unit
from tests.large_pipeline import built
from tests.schedules import build

PIPEDREAM_FLUSH = """
F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""

FEWER_MICRO_BATCHES_THAN_STAGES = """
F0 F1 B0 B1
F0 F1 B0 B1
F0 F1 B0 B1
F0 B0 F1 B1
"""

INTERLEAVED = """
F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3
F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3
"""


def rows(drawing):
    return Schedule.parse(drawing.strip().splitlines()).actions


def test_1f1b_as_drawn():
    assert build("1f1b", 4, 8).actions == rows(PIPEDREAM_FLUSH)


def test_1f1b_with_fewer_micro_batches_than_stages():
    assert build("1f1b", 4, 2).actions == rows(FEWER_MICRO_BATCHES_THAN_STAGES)


def test_interleaved_as_drawn():
    assert build("interleaved", 2, 4, 2).actions == rows(INTERLEAVED)


def test_gpipe_forwards_everything_first():
    assert build("gpipe", 2, 3).actions == rows("F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2")


@given(st.integers(1, 12), st.integers(1, 30))
def test_1f1b_holds_what_bpipe_says(stages, micro_batches):
    """μ(s) = min(p − s, m) (BPipe §3.1)."""
    schedule = build("1f1b", stages, micro_batches)
    assert schedule.peak_live == tuple(min(stages - s, micro_batches) for s in range(stages))
    assert schedule.bound == max(schedule.peak_live)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_holds_what_bpipe_says(stages, groups, chunks):
    """μ(s) = p(v − 1) + 2(p − s − 1) + 1, as far as there are units (BPipe, Appendix A)."""
    schedule = build("interleaved", stages, stages * groups, chunks)
    units = stages * groups * chunks
    assert schedule.peak_live == tuple(
        min(stages * (chunks - 1) + 2 * (stages - s - 1) + 1, units) for s in range(stages)
    )


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_is_megatrons_order(stages, groups, chunks):
    """Forwards follow `get_schedule_table` of megatron-core, backwards the same with chunks reversed."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = schedules.get_schedule_table(stages * groups, chunks, stages)
    for row in build("interleaved", stages, stages * groups, chunks).actions:
        assert [a.unit for a in row if a.kind == FORWARD] == [Unit(i, c) for i, c in table]
        assert [a.unit for a in row if a.kind != FORWARD] == [Unit(i, chunks - 1 - c) for i, c in table]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1d", 4, 8), "schedule=1f1d: unknown schedule, did you mean 1f1b?"),
        (("zigzag", 4, 8), "choose one of 1f1b, gpipe, "),
        (("1f1b", 0, 8), "stages=0: must be at least 1"),
        (("1f1b", 4, 0), "micro_batches=0: must be at least 1"),
        (("1f1b", 4, 8, 2), "chunks=2: 1f1b has one model chunk"),
        (("interleaved", 4, 8, 1), "chunks=1: interleaved needs at least 2"),
        (("interleaved", 1, 8, 2), "stages=1: interleaved needs at least 2"),
        (("interleaved", 4, 6, 2), "micro_batches=6: interleaved needs a multiple of stages=4"),
        (("gpipe", 4, 8, 1, True), "bpipe: gpipe leaves nothing to balance"),
        (("1f1b", 1, 8, 1, True), "bpipe: one stage has no partner"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message):
    with pytest.raises(ScheduleError, match=r"^[^\n]*$") as refusal:
        build(*arguments)
    assert message in str(refusal.value)


def test_64_stages_and_4096_micro_batches_are_built_and_verified_in_less_than_10_s():
    assert built().seconds < 10
