"""Clocks tell how long compute took, on the host or on the device; links and devices are measured."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.host_memory import HostLink
from evenpipe.runtime.timing import HostClock, Stopwatch, clock_for, copying_gbps, matrix_flops
from tests.reports import reports

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Held:
    """A message on a GPU: whoever waits for it stands still until `stream` has got this far."""

    def __init__(self, stream):
        self.through = stream.record_event()

    def wait(self):
        torch.cuda.current_stream().wait_event(self.through)


def test_the_hosts_clock_is_the_monotonic_one_that_a_machines_processes_share():
    clock = clock_for(torch.device("cpu"))
    before, mark, after = time.monotonic(), clock.mark(), time.monotonic()
    assert isinstance(clock, HostClock)
    assert before <= mark <= after
    assert clock.elapsed_ms(1.0, 1.25) == 250.0


def test_copies_to_the_host_and_back_are_timed_at_once_once_they_take_a_while(monkeypatch):
    """On a link of 0.1 GB/s, whose clock goes on with each copy: both directions pass 0.05 GB/s each."""
    now, copied, pinned = [0.0], Counter(), []

    class Slow(HostLink):
        def _start(self, stream, source, target, block):
            pinned.append(self.memory.nbytes)
            now[0] += source.numel() / 1e8
            copied[source.numel()] += 1
            return super()._start(stream, source, target, block)

    monkeypatch.setattr("evenpipe.runtime.timing.HostLink", Slow)
    monkeypatch.setattr("evenpipe.runtime.timing.time.perf_counter", lambda: now[0])
    assert copying_gbps(torch.device("cpu")) == pytest.approx(0.05)
    assert copied == {2**18: 4, 2**20: 4}
    # The third and the fourth copy of each size are timed, and pin nothing.
    assert pinned == [copies * nbytes for nbytes in (2**18, 2**20) for copies in (1, 2, 2, 2)]


@needs_gpu
def test_a_streams_clock_tells_the_devices_time_not_the_hosts():
    clock = clock_for(torch.device("cuda"))
    asked = time.monotonic()
    start = clock.mark()
    torch.cuda._sleep(100_000_000)
    end = clock.mark()
    assert time.monotonic() - asked < 0.03
    assert clock.elapsed_ms(start, end) > 30.0


@needs_gpu
def test_waits_on_a_gpu_are_what_the_compute_stream_stands_still():
    side, stopwatch = torch.cuda.Stream(), Stopwatch(clock_for(torch.device("cuda")))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
    stopwatch.wait(Transfer([Held(side)], []))
    exposed_ms = stopwatch.total_ms()
    assert exposed_ms > 30.0
    torch.cuda._sleep(100_000_000)  # compute goes on, and the message is long there
    stopwatch.wait(Transfer([Held(side)], []))
    assert stopwatch.total_ms() - exposed_ms < 1.0
    stopwatch.restart()
    assert stopwatch.total_ms() == 0.0


SLOW_GBPS = 0.01


def test_each_direction_of_a_pairs_links_is_measured_and_left_clean(tmp_path: Path) -> None:
    """Stage 0 sends slowly; messages that follow arrive as they were sent."""
    script = Path(__file__).with_name("link_speed_cases.py")
    evictor, middle, acceptor = reports(script, tmp_path, 3)
    assert SLOW_GBPS / 4 < evictor[0] < SLOW_GBPS < acceptor[0]
    assert evictor[1] < 10
    assert (evictor[2], acceptor[2]) == ([9], [7])
    assert middle[0] is None


def test_the_device_is_as_fast_as_a_product_on_it() -> None:
    shape, times = (64, 256, 512), 40
    left, right = torch.ones(shape[:2]), torch.ones(shape[1:])

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(times):
            left @ right
        return time.perf_counter() - start

    drawn = torch.get_rng_state()
    rounds = [(seconds(), matrix_flops(torch.device("cpu"), torch.float32, *shape)) for _ in range(5)]
    assert torch.equal(torch.get_rng_state(), drawn)
    flops = 2 * 64 * 256 * 512 * times / min(taken for taken, _ in rounds)
    assert flops / 5 < max(measured for _, measured in rounds) < flops * 5
