"""Clocks tell how long compute took, on the host or on the device."""

import time

import pytest
import torch

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.timing import HostClock, Stopwatch, clock_for

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
