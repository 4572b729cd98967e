"""A timeline of one training iteration, from all ranks, for ui.perfetto.dev."""

from __future__ import annotations

import atexit
import json
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state

from evenpipe.report import Timeline, perfetto_trace, write_atomically
from evenpipe.runtime.clock import Clock
from evenpipe.runtime.executor import Observer
from evenpipe.runtime.gather import gather_text
from evenpipe.runtime.spans import SpanRecorder
from evenpipe.schedule import Action, parse
from evenpipe.simulate import Span

__all__ = ["IterationTrace"]


class IterationTrace(Observer):
    """Records one iteration on every rank; rank 0 writes `path`, as ``evenpipe.trace/1``, a process a rank.

    `iteration` is as Megatron's log counts; None is the second that this run trains. `args` are Megatron's: `rank`,
    and `curr_iteration`, which Megatron sets before each iteration::

        PipelineSchedule(name, bpipe, observer=IterationTrace(config.trace, config.trace_iteration, args))

    The ranks' times count from the barrier that opens the traced iteration: rows are off against each other by what
    ranks leave it apart, some 0.1 ms. On a GPU they are times of the device. If the run ends without the iteration,
    rank 0 says so; a file that cannot be written in the end costs the trace, not the run.
    """

    def __init__(self, path: Path, iteration: int | None, args: Namespace) -> None:
        self._path = path.resolve()
        self._iteration = iteration
        self._args = args
        self._seen: tuple[int, int] | None = None
        self._recording: _Recording | None = None
        self._done = False
        atexit.register(self._tell_if_missed)

    def batch_started(self, clock: Clock) -> None:
        number = self._args.curr_iteration + 1
        first = self._seen[0] if self._seen else number
        self._seen = (first, number)
        wanted = number == self._iteration if self._iteration is not None else number > first
        if wanted and not self._done:
            dist.barrier()
            self._recording = _Recording(number, clock.mark(), SpanRecorder(clock))

    def started(self, action: Action) -> None:
        if self._recording is not None:
            self._recording.recorder.started(action)

    def ended(self, action: Action) -> None:
        if self._recording is not None:
            self._recording.recorder.ended(action)

    def batch_ended(self) -> None:
        if self._recording is None:
            return
        recording, self._recording, self._done = self._recording, None, True
        shares = gather_text(json.dumps(_Row.of(recording)))
        if shares is not None:
            self._write(recording.iteration, sorted(_Row(*json.loads(share)) for share in shares))

    def _write(self, iteration: int, rows: list[_Row]) -> None:
        names = tuple(row.name for row in rows)
        timeline = Timeline(f"iteration {iteration}", tuple(row.timeline for row in rows), names)
        try:
            write_atomically(self._path, json.dumps(perfetto_trace(timeline), separators=(",", ":")))
        except OSError as error:
            _say(f"the timeline of iteration {iteration} could not be written to {self._path}: {error.strerror}")
        else:
            _say(f"timeline of iteration {iteration} from {len(rows)} ranks: {self._path} (open in ui.perfetto.dev)")

    def _tell_if_missed(self) -> None:
        if self._done or self._args.rank != 0:
            return
        wanted = "a second iteration" if self._iteration is None else f"iteration {self._iteration}"
        trained = "none was trained" if self._seen is None else "this run trained {} to {}".format(*self._seen)
        _say(f"no timeline in {self._path}: {wanted} did not come, {trained}")


class _Recording(NamedTuple):
    """The traced iteration while it runs; `origin` is the clock's mark right after the barrier."""

    iteration: int
    origin: Any
    recorder: SpanRecorder


class _Row(NamedTuple):
    """What one rank did. Rows sort by pipeline, then stage; spans are (notation, start, end), in milliseconds."""

    data: int
    context: int
    tensor: int
    stage: int
    rank: int
    spans: tuple[tuple[str, float, float], ...]

    @classmethod
    def of(cls, recording: _Recording) -> _Row:
        return cls(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            dist.get_rank(),
            tuple(
                (str(action), round(start, 4), round(end, 4))
                for action, start, end in recording.recorder.since(recording.origin)
            ),
        )

    @property
    def name(self) -> str:
        context = f", context {self.context}" if parallel_state.get_context_parallel_world_size() > 1 else ""
        return f"stage {self.stage}, data {self.data}{context}, tensor {self.tensor} (rank {self.rank})"

    @property
    def timeline(self) -> tuple[Span, ...]:
        return tuple(Span(parse(notation), start, end) for notation, start, end in self.spans)


def _say(line: str) -> None:
    print(f" [evenpipe] {line}", flush=True)
