"""Times and bytes of each model chunk of a stage, taken while a batch trains."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple

from evenpipe.runtime.resources import Observer
from evenpipe.runtime.store import ActivationStore
from evenpipe.runtime.timing import Clock, SpanRecorder
from evenpipe.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Kind, Unit
from evenpipe.tuner.group_memory import Measured
from evenpipe.tuner.grouped import average_ms

__all__ = ["PartFigures", "PartWatch", "measured_by"]


_Times = defaultdict[tuple[Kind, int], list[float]]
_Sizes = defaultdict[tuple[Kind, int], Counter[int]]


class PartFigures(NamedTuple):
    """One model chunk and one micro-batch: milliseconds, and bytes.

    Times are medians. `saved_bytes` is the most that one saved for its backward, and `left_bytes` the most that one
    kept between the two halves of that. `recomputed_bytes` is the most that one saved that is computed again, whose
    input gradient takes `recompute_ms` longer, and which shows by what it leaves how much others of its size save. What
    no micro-batch shows is 0; where all are computed again, the input gradient's time is theirs. A whole backward
    counts as an input gradient, with no weight gradient. `staying_bytes` is the most of one that cannot leave.
    """

    forward_ms: float
    input_gradient_ms: float
    weight_gradient_ms: float
    saved_bytes: int
    left_bytes: int
    recomputed_bytes: int
    recompute_ms: float
    staying_bytes: int = 0


def measured_by(watch: PartWatch, message_bytes: int, static_bytes: int, differ: bool = False) -> Measured:
    """Return what the micro-batches of a stage with one chunk show, without the first one's time, which loads kernels.

    Where they `differ`, the largest counts: what two of them save says nothing of what they share. Times are the
    largest one's too: as much longer than the mean as it saves more.
    """
    saved = watch.nbytes[FORWARD, 0]
    least, most = min(saved), max(saved)  # the first to save what others save too counts as holding it
    each, stretch = (most, most / fmean(saved.elements())) if differ else (least, 1.0)
    forward_ms, backward_ms = (stretch * average_ms(watch.ms[kind, 0][1:]) for kind in (FORWARD, BACKWARD))
    return Measured(forward_ms, backward_ms, each, most - each, message_bytes, 0, static_bytes)


class PartWatch(Observer):
    """An observer of a stage that passes on to `then` all that it is told.

    `store` records the batch that is weighed, and `timed` is set for one that is timed: before it. Bytes that a store
    does not see: `kept` returns those that a framework keeps of a unit, `queued` all that wait in queues of layers for
    second halves of backwards. `recomputes` says which units are computed again. Since the last `clear`, by kind of
    action and model chunk: `ms` has the times, and `nbytes` how many micro-batches held so many bytes after it;
    `recomputed_ms` and `recomputed_nbytes` have those of units that are computed again; `staying_bytes` has, by chunk,
    the most that cannot leave the stage of what one unit saved.
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
        self._origin: Any = None
        self._spans: SpanRecorder | None = None
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self.ms, self.recomputed_ms = _Times(list), _Times(list)
        self.nbytes, self.recomputed_nbytes = _Sizes(Counter), _Sizes(Counter)
        self.staying_bytes = Counter[int]()

    def figures(self, chunks: int) -> list[PartFigures]:
        """Return those of each chunk, once a batch has been weighed and one has been timed."""
        return [self._of(chunk) for chunk in range(chunks)]

    def _of(self, chunk: int) -> PartFigures:
        usual_ms, again_ms = (
            each[INPUT_GRADIENT, chunk] or each[BACKWARD, chunk] for each in (self.ms, self.recomputed_ms)
        )
        saved, usual_left = (max(self.nbytes[kind, chunk], default=0) for kind in (FORWARD, INPUT_GRADIENT))
        again, again_left = (max(self.recomputed_nbytes[kind, chunk], default=0) for kind in (FORWARD, INPUT_GRADIENT))
        left = max(usual_left, again_left)
        return PartFigures(
            forward_ms=self._median_ms(FORWARD, chunk),
            input_gradient_ms=median(usual_ms or again_ms),
            weight_gradient_ms=self._median_ms(WEIGHT_GRADIENT, chunk),
            saved_bytes=saved * left // usual_left if usual_left else saved,
            left_bytes=left,
            recomputed_bytes=again,
            recompute_ms=max(0.0, median(again_ms) - median(usual_ms)) if usual_ms and again_ms else 0.0,
            staying_bytes=self.staying_bytes[chunk],
        )

    def _median_ms(self, kind: Kind, chunk: int) -> float:
        return median([*self.ms[kind, chunk], *self.recomputed_ms[kind, chunk]] or [0.0])

    def batch_started(self, clock: Clock) -> None:
        self.then.batch_started(clock)
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
            seen = self.store.nbytes(action.unit) + self._kept(action.unit)
            apart = sum(self.store.lasting_bytes.values()) if action.kind == FORWARD else self._queued() - self._before
            sizes = self.recomputed_nbytes if self.recomputes(action.unit) else self.nbytes
            sizes[action.kind, action.chunk][seen + apart] += 1
            if action.kind == FORWARD:
                staying = seen + apart - self.store.movable_bytes(action.unit)
                self.staying_bytes[action.chunk] = max(self.staying_bytes[action.chunk], staying)
        self.then.ended(action)

    def remark(self, line: str) -> None:
        self.then.remark(line)

    def batch_ended(self) -> None:
        if self._spans is not None:
            for action, start, end in self._spans.since(self._origin):
                times = self.recomputed_ms if self.recomputes(action.unit) else self.ms
                times[action.kind, action.chunk].append(end - start)
            self._spans = None
        self.store, self.timed = None, False
        self.then.batch_ended()
