"""How long a stage has computed, or been held up by transfers, in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.clock import Clock

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up stretches of one batch.

    On CPU a wait is the time the host is blocked. On CUDA it is the time the current stream stands still; the host goes
    on, and only reading waits for the device. A wait for what is long there takes some microseconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stretches: list[tuple[Any, Any]] = []

    def restart(self) -> None:
        """Forget the stretches so far."""
        self._stretches.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what is done within."""
        start = self._clock.mark()
        yield
        self._stretches.append((start, self._clock.mark()))

    def wait(self, transfer: Transfer) -> None:
        """Wait for `transfer`, and count the time."""
        with self.running():
            transfer.wait()

    def total_ms(self) -> float:
        """The sum since the last `restart`, in milliseconds."""
        return sum(self._clock.elapsed_ms(start, end) for start, end in self._stretches)
