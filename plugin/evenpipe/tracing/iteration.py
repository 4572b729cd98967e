"""Records one training iteration on every rank, and writes it for ui.perfetto.dev."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch.distributed as dist

from evenpipe.report.files import write_atomically
from evenpipe.report.timeline import Timeline, perfetto_trace
from evenpipe.runtime.exchange import gather
from evenpipe.runtime.executor import Observer
from evenpipe.runtime.timing import Clock, SpanRecorder
from evenpipe.schedule import Action, parse
from evenpipe.simulate import Span

__all__ = ["IterationTrace", "Place", "Row", "TracedJob"]

# Four processes on two busy cores left one barrier 1.3 ms apart, at worst 34 ms. The median over nine of them aligns
# their clocks to 0.2 ms, at worst 0.35 ms.
_BARRIERS = 9


class Place(NamedTuple):
    """Where a rank is in the grid of its job: rows are in `order`, pipeline by pipeline, then stage by stage."""

    order: tuple[int, ...]
    name: str


class Recording:
    """A record of what this rank does from here on; all ranks make one together, between two of their batches."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._barriers = []
        for _ in range(_BARRIERS):
            dist.barrier()
            self._barriers.append(clock.mark())
        self.spans = SpanRecorder(clock)

    def row(self, place: Place) -> Row:
        """Return what it was."""
        last = self._barriers[-1]
        return Row(
            [*place.order, dist.get_rank()],
            f"{place.name} (rank {dist.get_rank()})",
            [self._clock.elapsed_ms(left, last) for left in self._barriers],
            [(str(action), round(start, 4), round(end, 4)) for action, start, end in self.spans.since(last)],
        )


class Row(NamedTuple):
    """One rank's part; all of it goes through JSON, and rows sort by their places.

    `barriers`: how long before it left the last of the opening barriers the rank had left each, in milliseconds;
    `spans`: (notation, start, end), in milliseconds after that.
    """

    order: list[int]
    name: str
    barriers: list[float]
    spans: list[tuple[str, float, float]]

    def timeline(self, first: Row) -> tuple[Span, ...]:
        """Return the spans in milliseconds after `first` left the last barrier.

        Two ranks have left a barrier at the same time, as far as anybody knows: the median over the barriers of how
        much later this rank did by its own count is how far that count is ahead.
        """
        ahead = median(mine - other for other, mine in zip(first.barriers, self.barriers, strict=True))
        return tuple(Span(parse(notation), start + ahead, end + ahead) for notation, start, end in self.spans)


class TracedJob(NamedTuple):
    """A job as its trace needs it: this process's rank, and functions for the rest.

    `iteration` returns the number of the iteration that starts, `place` this rank's place in the grid. `say` logs a
    line.
    """

    rank: int
    iteration: Callable[[], int]
    place: Callable[[], Place]
    say: Callable[[str], None]


class IterationTrace(Observer):
    """Records one iteration on every rank; rank 0 writes `path`, as ``evenpipe.trace/1``, a process a rank.

    `iteration` is as the framework counts; None is the second that this run trains.

    Times count from the barriers with which the traced iteration opens: rows are off against each other by as much as a
    message takes (0.2 ms between four processes on two busy cores). On a GPU they are times of the device. If the run
    ends without the iteration, rank 0 says so; a file that cannot be written in the end costs the trace, not the run.
    """

    def __init__(self, path: Path, iteration: int | None, job: TracedJob) -> None:
        self._path = path.resolve()
        self._iteration = iteration
        self._job = job
        self._trained: tuple[int, int] | None = None  # the first and the last iteration so far
        self._recording: Recording | None = None
        self._done = False
        if job.rank == 0:
            atexit.register(self._tell_if_missed)

    def batch_started(self, clock: Clock) -> None:
        number = self._job.iteration()
        first = self._trained[0] if self._trained else number
        self._trained = (first, number)
        wanted = number == self._iteration if self._iteration is not None else number > first
        if wanted and not self._done:
            self._recording = Recording(clock)

    def started(self, action: Action) -> None:
        if self._recording is not None:
            self._recording.spans.started(action)

    def ended(self, action: Action) -> None:
        if self._recording is not None:
            self._recording.spans.ended(action)

    def batch_ended(self) -> None:
        if self._recording is None:
            return
        row, self._recording, self._done = self._recording.row(self._job.place()), None, True
        if (rows := gather(row)) is not None:
            self._write([Row(*each) for each in rows])

    def _write(self, rows: Sequence[Row]) -> None:
        assert self._trained is not None
        name = f"iteration {self._trained[1]}"
        ordered = sorted(rows)
        timeline = Timeline(name, tuple(row.timeline(rows[0]) for row in ordered), tuple(row.name for row in ordered))
        try:
            write_atomically(self._path, json.dumps(perfetto_trace(timeline), separators=(",", ":")))
        except OSError as error:
            self._job.say(f"the timeline of {name} could not be written to {self._path}: {error.strerror}")
        else:
            self._job.say(f"timeline of {name} from {len(rows)} ranks: {self._path} (open in ui.perfetto.dev)")

    def _tell_if_missed(self) -> None:
        if self._done:
            return
        wanted = "a second iteration" if self._iteration is None else f"iteration {self._iteration}"
        trained = "none was trained" if self._trained is None else "this run trained {} to {}".format(*self._trained)
        self._job.say(f"no timeline in {self._path}: {wanted} did not come, {trained}")
