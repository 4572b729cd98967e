"""Times and bytes of each model chunk of a stage, taken while a batch trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from evenpipe.runtime.resources import Observer
from evenpipe.runtime.store import ActivationStore
from evenpipe.runtime.timing import Clock, SpanRecorder
from evenpipe.schedule import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind, Unit

__all__ = ["PartFigures", "PartWatch"]


class PartFigures(NamedTuple):
    """One model chunk and one micro-batch: milliseconds, and bytes.

    Times are medians. `saved_bytes` is the most that one saved for its backward, and `left_bytes` the most that one
    kept between the two halves of that. `recomputed_bytes` is the most that one saved that is computed again; the other
    figures are of those that are not, times of the others only where all are. What no micro-batch shows is 0.
    """

    forward_ms: float
    input_gradient_ms: float
    weight_gradient_ms: float
    saved_bytes: int
    left_bytes: int
    recomputed_bytes: int


class PartWatch(Observer):
    """An observer of a stage that passes on to `then` all that it is told.

    `store` records the batch that is weighed, and `timed` is set for one that is timed: before it. `recomputes` says
    which units are computed again. Bytes that a store does not see: `kept` returns those that a framework keeps of a
    unit, `queued` all that wait in queues of layers for second halves of backwards.
    """

    def __init__(
        self,
        then: Observer | None = None,
        kept: Callable[[Unit], int] = lambda unit: 0,
        queued: Callable[[], int] = lambda: 0,
    ) -> None:
        self.store: ActivationStore | None = None
        self.timed = False
        self.recomputes: Callable[[Unit], bool] = lambda unit: False
        self.then = then if then is not None else Observer()
        self._kept = kept
        self._queued = queued
        self._before = 0  # bytes in queues when an input gradient starts
        self._clock: Clock | None = None
        self._origin: Any = None
        self._spans: SpanRecorder | None = None
        self._bytes: dict[tuple[Kind, int], int] = defaultdict(int)
        self._recomputed_bytes: dict[int, int] = defaultdict(int)
        self._ms: dict[tuple[Kind, int], float] = {}

    def figures(self, chunks: int) -> list[PartFigures]:
        """Return those of each chunk, once a batch has been weighed and one has been timed."""
        return [
            PartFigures(
                forward_ms=self._ms[FORWARD, chunk],
                input_gradient_ms=self._ms[INPUT_GRADIENT, chunk],
                weight_gradient_ms=self._ms[WEIGHT_GRADIENT, chunk],
                saved_bytes=self._bytes[FORWARD, chunk],
                left_bytes=self._bytes[INPUT_GRADIENT, chunk],
                recomputed_bytes=self._recomputed_bytes[chunk],
            )
            for chunk in range(chunks)
        ]

    def batch_started(self, clock: Clock) -> None:
        self.then.batch_started(clock)
        if self.store is not None:
            self._bytes.clear()
            self._recomputed_bytes.clear()
        if self.timed:
            self._origin, self._spans = clock.mark(), SpanRecorder(clock)

    def started(self, action: Action) -> None:
        self.then.started(action)
        if self.store is not None and action.kind == INPUT_GRADIENT:
            self._before = self._queued()
        if self._spans is not None:
            self._spans.started(action)

    def ended(self, action: Action) -> None:
        if self._spans is not None:
            self._spans.ended(action)
        if self.store is not None and action.kind in (FORWARD, INPUT_GRADIENT):
            apart = sum(self.store.lasting_bytes.values()) if action.kind == FORWARD else self._queued() - self._before
            self._note(action, self.store.nbytes(action.unit) + self._kept(action.unit) + apart)
        self.then.ended(action)

    def _note(self, action: Action, nbytes: int) -> None:
        if not self.recomputes(action.unit):
            key = action.kind, action.chunk
            self._bytes[key] = max(self._bytes[key], nbytes)
        elif action.kind == FORWARD:
            self._recomputed_bytes[action.chunk] = max(self._recomputed_bytes[action.chunk], nbytes)

    def remark(self, line: str) -> None:
        self.then.remark(line)

    def batch_ended(self) -> None:
        if self._spans is not None:
            of_kind: dict[tuple[Kind, int], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
            for action, start, end in self._spans.since(self._origin):
                of_kind[action.kind, action.chunk][self.recomputes(action.unit)].append(end - start)
            self._ms, self._spans = {key: median(usual or others) for key, (usual, others) in of_kind.items()}, None
        self.store, self.timed = None, False
        self.then.batch_ended()
