"""A timeline of one training iteration, from all ranks, for ui.perfetto.dev."""

from __future__ import annotations

import atexit
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from evenpipe.megatron.script.row import Recording, Row
from evenpipe.report import Timeline, perfetto_trace, write_atomically
from evenpipe.runtime.clock import Clock
from evenpipe.runtime.executor import Observer
from evenpipe.runtime.gather import gather_text
from evenpipe.schedule import Action

__all__ = ["IterationTrace"]


class IterationTrace(Observer):
    """Records one iteration on every rank; rank 0 writes `path`, as ``evenpipe.trace/1``, a process a rank.

    `iteration` is as Megatron's log counts; None is the second that this run trains. `args` are Megatron's: `rank`,
    and `curr_iteration`, which Megatron sets before each iteration::

        PipelineSchedule(name, bpipe, observer=IterationTrace(config.trace, config.trace_iteration, args))

    Times count from the barriers with which the traced iteration opens: rows are off against each other by as much as a
    message takes (0.2 ms between four processes on two busy cores). On a GPU they are times of the device. If the run
    ends without the iteration, rank 0 says so; a file that cannot be written in the end costs the trace, not the run.
    """

    def __init__(self, path: Path, iteration: int | None, args: Namespace) -> None:
        self._path = path.resolve()
        self._iteration = iteration
        self._args = args
        self._trained: tuple[int, int] | None = None  # the first and the last iteration so far
        self._recording: Recording | None = None
        self._done = False
        atexit.register(self._tell_if_missed)

    def batch_started(self, clock: Clock) -> None:
        number = self._args.curr_iteration + 1
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
        row, self._recording, self._done = self._recording.row(), None, True
        shares = gather_text(json.dumps(row))
        if shares is not None:
            self._write([Row(*json.loads(share)) for share in shares])

    def _write(self, rows: Sequence[Row]) -> None:
        name = f"iteration {self._args.curr_iteration + 1}"
        ordered = sorted(rows)
        timeline = Timeline(name, tuple(row.timeline(rows[0]) for row in ordered), tuple(row.name for row in ordered))
        try:
            write_atomically(self._path, json.dumps(perfetto_trace(timeline), separators=(",", ":")))
        except OSError as error:
            _say(f"the timeline of {name} could not be written to {self._path}: {error.strerror}")
        else:
            _say(f"timeline of {name} from {len(rows)} ranks: {self._path} (open in ui.perfetto.dev)")

    def _tell_if_missed(self) -> None:
        if self._done or self._args.rank != 0:
            return
        wanted = "a second iteration" if self._iteration is None else f"iteration {self._iteration}"
        trained = "none was trained" if self._trained is None else "this run trained {} to {}".format(*self._trained)
        _say(f"no timeline in {self._path}: {wanted} did not come, {trained}")


def _say(line: str) -> None:
    print(f" [evenpipe] {line}", flush=True)
