"""Where in a run a process is: for its error message, and for rehearsing an error there."""

from __future__ import annotations

import os
import signal

from evenpipe.schedule import Action
from evenpipe.train.fields import Fault

__all__ = ["FailureContext"]


class FailureContext:
    """Knows where one process of stage `stage` is: `position` names the action, or the phase outside of a schedule."""

    def __init__(self, stage: int, fault: Fault | None = None) -> None:
        self.stage = stage
        self.position = "start-up"
        #: Whether the forward under way is to give NaN, to rehearse that.
        self.spoils_output = False
        self._iteration = -1
        self._fault = fault if fault is not None and fault.stage == stage else None

    def enter(self, phase: str) -> None:
        """The process goes on to `phase`, e.g. "optimizer step"."""
        self.position = phase

    def start_iteration(self, iteration: int) -> None:
        """A batch begins."""
        self._iteration = iteration
        self.position = "start of the iteration"

    def start_action(self, action: Action) -> None:
        """The process starts `action`. Raises RuntimeError, or ends the process, where that is to be rehearsed."""
        self.position = str(action)
        fault = self._fault
        here = fault is not None and fault.action == action and fault.iteration in (None, self._iteration)
        self.spoils_output = here and fault is not None and fault.kind == "nan"
        if not here or fault is None:
            return
        if fault.kind == "raise":
            raise RuntimeError("rehearsed failure, asked for by --fault-at")
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
