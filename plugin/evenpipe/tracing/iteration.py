"""Records one training iteration on every rank, and writes it for ui.perfetto.dev."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from evenpipe.report import Timeline, perfetto_trace, write_atomically
from evenpipe.runtime.clock import Clock
from evenpipe.runtime.executor import Observer
from evenpipe.runtime.gather import gather_text
from evenpipe.schedule import Action
from evenpipe.tracing.row import Place, Recording, Row

__all__ = ["IterationTrace", "TracedJob"]


class TracedJob(NamedTuple):
    """What a trace has to know of the job: this process's rank, the number of the iteration that starts, where in the
    grid this rank is, and how a line is said."""

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
        shares = gather_text(json.dumps(row))
        if shares is not None:
            self._write([Row(*json.loads(share)) for share in shares])

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
