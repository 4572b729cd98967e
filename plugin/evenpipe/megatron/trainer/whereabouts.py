"""Where in a run a process is: for its error message, and for rehearsing an error there."""

from __future__ import annotations

from evenpipe.megatron.trainer.options import Fault
from evenpipe.schedule import Action

__all__ = ["Whereabouts"]


class Whereabouts:
    """Follows one process of stage `stage`. `position` names the action, or the phase outside of a schedule."""

    def __init__(self, stage: int, fault: Fault | None = None) -> None:
        self.stage = stage
        self.position = "start-up"
        self._iteration = -1
        self._fault = fault if fault is not None and fault.stage == stage else None

    def enter(self, phase: str) -> None:
        """The process goes on to `phase`, e.g. "optimizer step"."""
        self.position = phase

    def start_iteration(self, iteration: int) -> None:
        """A batch begins."""
        self._iteration = iteration
        self.position = "start of the iteration"

    def act(self, action: Action) -> None:
        """The process starts `action`. Raises RuntimeError where a failure is to be rehearsed."""
        self.position = str(action)
        if self._fault is not None and (self._iteration, action) == (self._fault.iteration, self._fault.action):
            raise RuntimeError("rehearsed failure, asked for by --fault-at")
