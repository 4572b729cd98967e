"""How long a stage's compute has been held up by transfers."""

from __future__ import annotations

from typing import Any

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.clock import Clock

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up the waits of one batch.

    On CPU that is the time the host is blocked. On CUDA it is the time the current stream stands still; the host goes
    on, and only reading waits for the device. A wait for what is long there takes some microseconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: list[tuple[Any, Any]] = []

    def restart(self) -> None:
        """Forget the waits so far."""
        self._waits.clear()

    def wait(self, transfer: Transfer) -> None:
        """Wait for `transfer`, and count the time."""
        start = self._clock.mark()
        transfer.wait()
        self._waits.append((start, self._clock.mark()))

    def total_ms(self) -> float:
        """The sum since the last `restart`, in milliseconds."""
        return sum(self._clock.elapsed_ms(start, end) for start, end in self._waits)
