"""Records what one stage does: when each action ran, what a forward saved, and which action an error belongs to."""

from __future__ import annotations

from evenpipe.runtime.clock import HostClock
from evenpipe.runtime.spans import SpanRecorder
from evenpipe.schedule import Action
from evenpipe.simulate import Span
from evenpipe.train.failure import FailureContext

__all__ = ["Recorder"]


class Recorder:
    """Told when actions start and end (the executor's `Observer`); keeps the spans of the present batch.

    Times are of the host's monotonic clock, which the processes of a machine share: on a GPU they say when work was
    handed to the device, not when the device did it.
    """

    def __init__(self, failure: FailureContext) -> None:
        self._failure = failure
        self._recorder = SpanRecorder(HostClock())
        self._unit_bytes: dict[int, int] = {}

    @property
    def spans(self) -> tuple[Span, ...]:
        """What has ended in this batch, in the order of the ends; milliseconds."""
        return tuple(Span(*span) for span in self._recorder.since(0.0))

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Per chunk, what one micro-batch saves that no other has saved before it."""
        return tuple(size for _, size in sorted(self._unit_bytes.items()))

    def start_batch(self) -> None:
        """Forget the batch before."""
        self._recorder.clear()
        self._unit_bytes.clear()

    def started(self, action: Action) -> None:
        """`action` starts. Raises RuntimeError where a failure is to be rehearsed."""
        self._failure.start_action(action)
        self._recorder.started(action)

    def ended(self, action: Action) -> None:
        """`action` has ended; a transfer, when its completion has been waited for."""
        self._recorder.ended(action)

    def saved(self, action: Action, nbytes: int) -> None:
        """The forward `action` has saved `nbytes` for its backward."""
        # The first micro-batch also saves what all share, such as the causal mask.
        self._unit_bytes[action.chunk] = min(nbytes, self._unit_bytes.get(action.chunk, nbytes))
