"""Records when each action of a batch ran."""

from __future__ import annotations

from typing import Any

from evenpipe.runtime.clock import Clock
from evenpipe.schedule import Action

__all__ = ["SpanRecorder"]


class SpanRecorder:
    """Told when actions start and end; keeps their spans. A mark is one of `clock`'s.

    A compute action lasts as long as it takes on the clock's side: on the device under a `StreamClock`. A transfer
    lasts from where compute was when it was started to where compute was when it had been waited for; it may have
    arrived long before that.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started: dict[Action, Any] = {}
        self._ended: list[tuple[Action, Any, Any]] = []

    def clear(self) -> None:
        """Forget what has ended."""
        self._ended.clear()

    def started(self, action: Action) -> None:
        self._started[action] = self._clock.mark()

    def ended(self, action: Action) -> None:
        self._ended.append((action, self._started.pop(action), self._clock.mark()))

    def since(self, origin: Any) -> tuple[tuple[Action, float, float], ...]:
        """(action, start, end) of what has ended, in the order of the ends; milliseconds after the mark `origin`."""
        elapsed_ms = self._clock.elapsed_ms
        return tuple((action, elapsed_ms(origin, start), elapsed_ms(origin, end)) for action, start, end in self._ended)
