"""What a stage's compute is timed by: the host's clock, or events on the stream of a GPU."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from evenpipe.runtime import streams

__all__ = ["Clock", "HostClock", "StreamClock", "clock_for"]


class Clock(Protocol):
    """Marks moments in a stage's compute. What a mark is, only its clock knows."""

    def mark(self) -> Any:
        """The moment at which compute has got this far."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one mark to a later one."""


class HostClock:
    """Marks are seconds of the monotonic clock, which the processes of a machine share."""

    def mark(self) -> float:
        return time.monotonic()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


class StreamClock:
    """Marks are events on the current CUDA stream: of the time at which the device gets there, not the host.

    Reading waits for the device to get to the later mark; the resolution is about 0.5 µs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> streams.Event:
        return streams.timed_event(self._device)

    def elapsed_ms(self, start: streams.Event, end: streams.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end)


def clock_for(device: torch.device) -> Clock:
    """The clock of what is computed on `device`."""
    return StreamClock(device) if streams.is_asynchronous(device) else HostClock()
