"""Large pipelines are simulated in seconds, in little memory, and time grows with the number of actions."""

from __future__ import annotations

import subprocess
import sys
from time import process_time

import pytest

from evenpipe.schedule import Program, lower
from evenpipe.simulate import Costs, Wire, simulate
from tests.schedules import build

MIB = 2**20
SLOWER_MACHINE = 3

#: The command, and then its processor time in seconds and its peak memory in KiB (getrusage counts the parent's too).
MEASURED = """
import atexit, re, runpy, sys, time

@atexit.register
def tell():
    peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())
    print(time.process_time(), peak[1], file=sys.stderr)

runpy.run_module("evenpipe", run_name="__main__", alter_sys=True)
"""


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


@pytest.mark.parametrize(
    ("stages", "micro_batches", "seconds", "makespan"),
    [(64, 4096, 5, "12,477"), pytest.param(512, 1024, 10, "4,605", marks=pytest.mark.long)],
)
def test_a_large_pipeline_is_built_verified_and_simulated_in_seconds(
    stages: int, micro_batches: int, seconds: float, makespan: str
) -> None:
    """The whole command: the processor time of an idle core, and the most memory at once."""
    arguments = "simulate", "--schedule", "1f1b", "--bpipe", "--stages", stages, "--micro-batches", micro_batches
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used_s, peak_kib = map(float, done.stderr.split())
    assert f"makespan {makespan} ms" in done.stdout  # (m + p − 1)(tf + tb): transfers that take nothing delay nothing
    assert peak_kib * 1024 < 400 * MIB
    assert used_s < SLOWER_MACHINE * seconds
