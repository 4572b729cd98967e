"""2BW on the clock: no bubble but at the two ends of the stream (PipeDream-2BW §3.1)."""

from __future__ import annotations

import pytest

from evenpipe.simulate import Simulation, Wire
from tests.simulate.pipelines import run

FORWARD, BACKWARD = 3.0, 5.0
SIZES = [(1, 1), (1, 3), (2, 2), (2, 5), (4, 4), (4, 5), (4, 8), (8, 8), (8, 16)]


def starts(simulation: Simulation, stage: int) -> dict[tuple[str, int], float]:
    return {(a.kind, a.micro_batch): start for a, start, _ in simulation.timeline[stage] if a.kind in "FB"}


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_a_stream_fills_and_drains_the_pipeline_once(p: int, m: int, batches: int) -> None:
    simulation = run("2bw", p, m, batches=batches, forward=FORWARD, backward=BACKWARD)
    assert simulation.makespan_ms == (batches * m + p - 1) * (FORWARD + BACKWARD)
    assert simulation.bubble_fraction == pytest.approx((p - 1) / (batches * m + p - 1))
    assert all(stage.busy_ms == batches * m * (FORWARD + BACKWARD) for stage in simulation.stages)


@pytest.mark.parametrize(("bpipe", "forward", "backward"), [(False, 3.0, 5.0), (True, 2.0, 4.0)])
@pytest.mark.parametrize(("p", "m"), [size for size in SIZES if size[0] > 1])
def test_a_batch_takes_the_time_of_its_compute(p: int, m: int, bpipe: bool, forward: float, backward: float) -> None:
    """On every stage, from a micro-batch to that of the next batch: m(tf + tb), transfers of up to tf included."""
    transfer = Wire(transmit_ms=forward)
    simulation = run("2bw", p, m, batches=6, bpipe=bpipe, forward=forward, backward=backward, transfer=transfer)
    for stage in range(p):
        at = starts(simulation, stage)
        for micro_batch in range(2 * m, 4 * m):  # neither fills nor drains the pipeline
            for kind in "FB":
                assert at[kind, micro_batch + m] - at[kind, micro_batch] == m * (forward + backward)


@pytest.mark.parametrize(("p", "m", "speed_up"), [(4, 4, 1.75), (4, 8, 1.375), (8, 8, 1.875)])
def test_the_speed_up_over_a_flush_each_batch(p: int, m: int, speed_up: float) -> None:
    """(m + p − 1)/m in the steady state."""
    flushed = run("1f1b", p, m).makespan_ms
    longer, shorter = (run("2bw", p, m, batches=batches).makespan_ms for batches in (7, 4))
    assert flushed / ((longer - shorter) / 3) == speed_up == (m + p - 1) / m


def test_the_slowest_stage_sets_the_pace() -> None:
    times = (1.0, 1.0, 4.0, 1.0), (2.0, 2.0, 8.0, 2.0)
    at = starts(run("2bw", 4, 6, batches=5, forward=times[0], backward=times[1]), 2)
    assert at["F", 18] - at["F", 12] == 6 * (4.0 + 8.0)


def test_bpipe_costs_a_stream_no_time_and_holds_its_bound() -> None:
    transfer = Wire(transmit_ms=1.0)
    plain = run("2bw", 8, 8, batches=4)
    level = run("2bw", 8, 8, batches=4, bpipe=True, transfer=transfer)
    assert level.makespan_ms == plain.makespan_ms
    assert [stage.peak_live for stage in plain.stages] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert max(stage.peak_live for stage in level.stages) == 5  # ⌈(8 + 2)/2⌉


def test_updates_take_no_time_and_hold_nothing() -> None:
    for spans in run("2bw", 3, 4, batches=3).timeline:
        updates = [span for span in spans if span.action.kind == "U"]
        assert [span.action.micro_batch for span in updates] == [0, 1, 2]
        assert all(span.start_ms == span.end_ms for span in updates)
