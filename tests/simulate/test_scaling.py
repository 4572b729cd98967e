"""Large pipelines are simulated in seconds, and time grows with the number of actions."""

from __future__ import annotations

from time import process_time

import pytest

from evenpipe.schedule import Program, lower
from evenpipe.simulate import Costs, Wire, simulate
from tests.large_pipeline import built
from tests.schedules import build


def seconds_to_simulate(program: Program) -> float:
    p = program.schedule.stages
    transfer = Wire(latency_ms=0.01, transmit_ms=0.5)
    costs = Costs(forward_ms=(1.0,) * p, backward_ms=(2.0,) * p, wires={"evict": transfer, "load": transfer})
    start = process_time()
    simulate(program, costs)
    return process_time() - start


def test_time_grows_linearly_in_the_actions() -> None:
    small, large = (lower(build("1f1b", 8, m, bpipe=True)) for m in (512, 2048))
    ratio = min(seconds_to_simulate(large) for _ in range(3)) / min(seconds_to_simulate(small) for _ in range(3))
    assert 4 / 2.5 < ratio < 4 * 2.5


@pytest.mark.timeout(180)
def test_64_stages_and_4096_micro_batches_take_less_than_20_s() -> None:
    schedule = built().schedule
    built.cache_clear()
    assert seconds_to_simulate(lower(schedule)) < 20
