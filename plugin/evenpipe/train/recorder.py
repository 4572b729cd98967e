"""Records what one stage does: when each action ran, what a forward saved, and where an error is."""

from __future__ import annotations

from collections.abc import Callable

from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.timing import HostClock, SpanRecorder
from evenpipe.schedule import Action
from evenpipe.simulate import MemoryPoint, Span

__all__ = ["FailureContext", "Recorder"]


class FailureContext:
    """Knows where one process of stage `stage` is: `position` names the action, or the phase outside of a schedule."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.position = "start-up"

    def enter(self, phase: str) -> None:
        """The process goes on to `phase`, e.g. "optimizer step"."""
        self.position = phase

    def start_iteration(self, iteration: int) -> None:
        """A batch begins."""
        self.position = "start of the iteration"

    def start_action(self, action: Action) -> None:
        """The process starts `action`."""
        self.position = str(action)


class Recorder:
    """Told when actions start and end (the executor's `Observer`); keeps the spans of the present batch.

    Times are of the host's monotonic clock, which the processes of a machine share: on a GPU they say when work was
    handed to the device, not when the device did it.
    """

    def __init__(self, failure: FailureContext) -> None:
        self._failure = failure
        self._clock = HostClock()
        self._recorder = SpanRecorder(self._clock)
        self._unit_bytes: dict[int, int] = {}
        self._counter: Callable[[], MemoryCounter] | None = None
        self._held: list[tuple[float, int, int]] = []

    def watch(self, counter: Callable[[], MemoryCounter]) -> None:
        """From here on, note what `counter()` has whenever an action starts or ends."""
        self._counter = counter

    @property
    def spans(self) -> tuple[Span, ...]:
        """What has ended in this batch, in the order of the ends; milliseconds."""
        return tuple(Span(*span) for span in self._recorder.since(0.0))

    @property
    def memory(self) -> tuple[MemoryPoint, ...]:
        """What the stage held in this batch, own and accepted, where that changed; of the same clock as the spans."""
        marked = (MemoryPoint(self._clock.elapsed_ms(0.0, at), live, nbytes) for at, live, nbytes in self._held)
        points: list[MemoryPoint] = []
        for point in marked:
            if not points or points[-1][1:] != point[1:]:
                points.append(point)
        return tuple(points)

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Per chunk, what one micro-batch saves that no other has saved before it."""
        return tuple(size for _, size in sorted(self._unit_bytes.items()))

    def start_batch(self) -> None:
        """Forget the batch before."""
        self._recorder.clear()
        self._unit_bytes.clear()
        self._held.clear()
        self._note_held()

    def started(self, action: Action) -> None:
        """`action` starts."""
        self._failure.start_action(action)
        self._note_held()
        self._recorder.started(action)

    def ended(self, action: Action) -> None:
        """`action` has ended; a transfer, when its completion has been waited for."""
        # Held at the end of its span, not a moment after it: readers match the two by time.
        self._note_held()
        self._recorder.ended(action)

    def saved(self, action: Action, nbytes: int) -> None:
        """The forward `action` has saved `nbytes` for its backward."""
        # The first micro-batch also saves what all share, such as the causal mask.
        self._unit_bytes[action.chunk] = min(nbytes, self._unit_bytes.get(action.chunk, nbytes))

    def _note_held(self) -> None:
        if self._counter is not None:
            counter = self._counter()
            live, nbytes = counter.own_units + counter.accepted_units, counter.own_bytes + counter.accepted_bytes
            self._held.append((self._clock.mark(), live, nbytes))
