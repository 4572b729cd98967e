"""A timeline and per-stage memory, of a simulation or of a run, and the timeline as a trace for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from evenpipe.schedule import COMPUTE, DEPARTING, KINDS, UPDATE, Action, batch_of, required_version
from evenpipe.simulate import Simulation, Span

__all__ = ["TRACE", "StageMemory", "Timeline", "lane_of", "perfetto_trace"]

TRACE: Final = "evenpipe.trace/1"


@dataclass(frozen=True)
class Timeline:
    """One batch, or a stream of them, in time: per stage, the span of each action, in milliseconds from a common start.

    With `names`, one for each row, a trace has rows of other things than the stages of one pipeline. `micro_batches`
    are those of one batch: they tell the batches of a stream, and so their weight versions, apart.
    """

    title: str
    stages: Sequence[tuple[Span, ...]]
    names: tuple[str, ...] | None = None
    micro_batches: int | None = None

    @classmethod
    def of(cls, simulation: Simulation, title: str, micro_batches: int | None = None) -> Timeline:
        return cls(title, simulation.timeline, micro_batches=micro_batches)

    def version(self, action: Action) -> int:
        """The weight version that a forward or backward uses: 0 throughout, but in a stream of several batches."""
        return 0 if self.micro_batches is None else required_version(batch_of(action.micro_batch, self.micro_batches))

    def name(self, row: int) -> str:
        return f"stage {row}" if self.names is None else self.names[row]

    @property
    def duration_ms(self) -> float:
        """When the last span ends."""
        return max((span.end_ms for spans in self.stages for span in spans), default=0.0)


@dataclass(frozen=True)
class StageMemory:
    """Peak per stage, as predicted and, after a real run, as measured; both in ``unit`` (e.g. "MiB", "live units")."""

    title: str
    unit: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...] | None = None


_COMPUTE_THREAD = 0
_COMPUTED = COMPUTE | {UPDATE}


def lane_of(action: Action) -> Literal["compute", "update", "leaving", "arriving"]:
    """Return where a picture has an action within its stage's row."""
    if action.kind in COMPUTE:
        return "compute"
    if action.kind == UPDATE:
        return "update"
    return "leaving" if action.kind in DEPARTING else "arriving"


def perfetto_trace(timeline: Timeline) -> dict[str, Any]:
    """The JSON document ``evenpipe.trace/1``: a process a stage, with a compute thread and one for its transfers.

    Updates stand between what is computed; one that takes no time is an instant.

    Transfers of a stage that overlap get further threads: slices of one thread have to nest. Times are microseconds,
    names of slices are the schedule notation, names of processes those of the timeline's rows.
    """
    events: list[dict[str, Any]] = []
    for stage, spans in enumerate(timeline.stages):
        events.append(_metadata("process_name", stage, name=timeline.name(stage)))
        events.append(_metadata("process_sort_index", stage, sort_index=stage))
        threads = {_COMPUTE_THREAD: "compute"}
        compute = [(_COMPUTE_THREAD, span) for span in spans if span.action.kind in _COMPUTED]
        for thread, span in (*compute, *_lanes([span for span in spans if span.action.kind not in _COMPUTED])):
            lane = thread - _COMPUTE_THREAD
            threads.setdefault(thread, "transfers" if lane == 1 else f"transfers {lane}")
            events.append(_event(stage, thread, span))
        events.extend(_metadata("thread_name", stage, thread, name=name) for thread, name in threads.items())
    return {
        "format": TRACE,
        "displayTimeUnit": "ms",
        "otherData": {"title": timeline.title},
        "traceEvents": events,
    }


def _lanes(transfers: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each transfer with the first thread after compute that is free when it starts."""
    ends: list[float] = []
    for span in sorted(transfers, key=lambda span: span.start_ms):
        lane = next((lane for lane, end in enumerate(ends) if end <= span.start_ms), len(ends))
        ends[lane : lane + 1] = [span.end_ms]
        yield _COMPUTE_THREAD + 1 + lane, span


def _event(stage: int, thread: int, span: Span) -> dict[str, Any]:
    """Return a slice, or an instant of the thread (``"s": "t"``) for an update that takes no time."""
    action = span.action
    update, duration_us = action.kind == UPDATE, (span.end_ms - span.start_ms) * 1e3
    return {
        **({"ph": "i", "s": "t"} if update and not duration_us else {"ph": "X", "dur": duration_us}),
        "name": str(action),
        "cat": KINDS[action.kind].name,
        "pid": stage,
        "tid": thread,
        "ts": span.start_ms * 1e3,
        "args": {"batch": action.micro_batch} if update else {"micro_batch": action.micro_batch, "chunk": action.chunk},
    }


def _metadata(what: str, stage: int, thread: int = _COMPUTE_THREAD, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": stage, "tid": thread, "args": args}
