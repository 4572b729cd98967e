"""Exchanges that travel with the figures of a step, at their place in the one order of all stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenpipe.two_bw.steps import TwoBWSteps

__all__ = ["AlongFigures"]


class AlongFigures:
    """Starts one exchange with the figures of a step, or at once where none are owed.

    The last stage would begin it between two batches, and then a wait of its host for its device would wait for the
    first stage. Under BPipe, that one ends its batch by what the last does in the next.
    """

    def __init__(self) -> None:
        self._steps: TwoBWSteps | None = None
        self._waiting: Callable[[], None] | None = None

    def begin(self, steps: TwoBWSteps) -> None:
        """Go by the figures of `steps` from now on."""
        if steps is not self._steps:
            steps.gather_too.append(self.start_now)
        self._steps = steps

    def start(self, exchange: Callable[[], None]) -> None:
        """Call `exchange` with the figures, or at once; one at a time."""
        self._waiting = exchange
        if self._steps is None or not self._steps.owes_figures:
            self.start_now()

    def start_now(self) -> None:
        """Start what waits, if anything does."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting()
