"""What stages hold over time: live units, own and accepted, and their bytes."""

from __future__ import annotations

import pytest

from evenpipe.simulate import Wire
from tests.schedules import build
from tests.simulate.pipelines import run


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 8), (5, 20), (8, 8)])
def test_1f1b_holds_p_minus_s_and_gpipe_everything(p: int, m: int) -> None:
    assert [stage.peak_live for stage in run("1f1b", p, m).stages] == [min(p - s, m) for s in range(p)]
    assert [stage.peak_live for stage in run("gpipe", p, m).stages] == [m] * p


@pytest.mark.parametrize("transfer", [0.0, 0.5, 5.0])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_the_clock_counts_what_the_schedule_promises(name: str, chunks: int, transfer: float) -> None:
    schedule = build(name, 4, 8, chunks, bpipe=True)
    simulation = run(name, 4, 8, chunks=chunks, bpipe=True, transfer=Wire(transmit_ms=transfer))
    assert tuple(stage.peak_live for stage in simulation.stages) == schedule.peak_live
    assert max(schedule.peak_live) <= schedule.bound


def test_a_unit_in_flight_counts_at_both_ends() -> None:
    """Stage 0 of Figure 4 gives up micro-batch 1 only when it needs its place, for micro-batch 3."""
    simulation = run("1f1b", 4, 8, bpipe=True, transfer=Wire(transmit_ms=0.5))
    assert [(at, live) for at, live, _ in simulation.stages[0].memory[:5]] == [
        (0.0, 1),
        (1.0, 2),
        (2.0, 3),
        (3.0, 2),
        (3.0, 3),
    ]
    accepted = simulation.stages[3].memory[0]
    assert accepted.live == 1
    assert accepted.at_ms <= 2.0  # its place is taken from when it may arrive


def test_an_accepted_unit_weighs_what_it_weighs_at_its_evictor() -> None:
    simulation = run("1f1b", 4, 8, bpipe=True, unit_bytes=[[100], [90], [80], [10]])
    assert simulation.stages[0].peak_bytes == 3 * 100
    assert simulation.stages[3].peak_bytes == 2 * 100 + 10  # A1@0, A3@0 and F0 of its own


def test_chunks_weigh_differently() -> None:
    simulation = run("interleaved", 2, 2, chunks=2, unit_bytes=[[1, 1000], [1, 1000]])
    assert simulation.stages[0].peak_bytes == 2 * 1 + 2 * 1000
    assert simulation.stages[1].peak_live == 3
    assert simulation.stages[1].peak_bytes == 2 * 1 + 1 * 1000


def test_a_unit_weighs_what_its_input_gradient_has_left_from_then_on() -> None:
    """The last stage of ZB-H1: F0 D0 F1 D1 W0 F2 D2 W1 W2. Without recomputation less is left, with it more."""
    less, more = (run("zb-h1", 2, 3, unit_bytes=[[10]] * 2, left_bytes=[[n]] * 2).stages[1] for n in (4, 15))
    assert [held for _, _, held in less.memory] == [10, 4, 14, 8, 4, 14, 8, 4, 0]
    assert [held for _, _, held in more.memory] == [10, 15, 25, 30, 15, 25, 30, 15, 0]
    assert [live for _, live, _ in more.memory] == [1, 1, 2, 2, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_nothing_is_left_after_a_batch(name: str) -> None:
    for stage in run(name, 4, 8, bpipe=name == "1f1b", unit_bytes=[[7]] * 4, left_bytes=[[5]] * 4).stages:
        assert stage.memory[-1].live == 0
        assert stage.memory[-1].bytes == 0
        assert list(stage.memory) == sorted(stage.memory, key=lambda point: point.at_ms)
