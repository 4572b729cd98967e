"""Start the processes of training runs; bring back their results, or the failure that came first."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from evenpipe.train.engines import ENGINES
from evenpipe.train.machine import check_room
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.ownership import Disturbed, owned
from evenpipe.train.result import STOPPING, Failure, Iteration, Note, Results, RunResult, Saved, Stopping
from evenpipe.train.rules import device_type
from evenpipe.wording.printable import printable

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess

__all__ = ["Progress", "StageFailed", "Stopped", "run_cases"]

Progress = Callable[[Iteration], None]

_POLL_SECONDS: Final = 0.1
#: From the first sign of a failure to the end of all processes. One that dies without a word (out of memory, say)
#: breaks its peers' connections at once: what they report must not hide it.
_NOTICE_SECONDS: Final = 0.5


class StageFailed(RuntimeError):
    """A stage raised, or its process died; the message is one line. `details` is its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Stopped(RuntimeError):
    """A signal told the parent to end; the processes of the run have ended. `saved` is their last checkpoint."""

    def __init__(self, number: int, saved: Path | None = None) -> None:
        how_to_go_on = f": saved {saved}: go on with --load {saved.parent}" if saved is not None else ""
        super().__init__(f"stopped by {signal.Signals(number).name}{how_to_go_on}")
        self.number = number


def run_cases(cases: Sequence[TrainOptions], progress: Progress = lambda iteration: None) -> list[RunResult]:
    """Train every case; consecutive ones of one world size and engine share processes. Results in their order.

    `progress` is called from another thread, with the number of the case among all. All processes have ended when this
    returns or raises.
    Raises StageFailed for the failure that came first, OptionsError where that is one of the options which only a run
    could find, and Stopped when SIGINT, SIGTERM, SIGHUP or SIGQUIT ends the run (in the main thread: others get no
    signals).
    """
    results: list[RunResult] = []

    def numbered(done: Iteration) -> None:
        progress(done._replace(case=len(results) + done.case))

    try:
        for _, group in groupby(cases, key=lambda options: (options.world_size, ENGINES[options.engine].path)):
            results += _run_together(tuple(group), numbered)
    except KeyboardInterrupt:
        # Before there are handlers of signals.
        raise Stopped(signal.SIGINT) from None
    return results


def _run_together(cases: tuple[TrainOptions, ...], progress: Progress) -> list[RunResult]:
    from torch._C._distributed_c10d import TCPStore

    from evenpipe.train import process

    world_size = cases[0].world_size
    check_room(world_size)
    kind, run = device_type(world_size), uuid.uuid4().hex
    with _owned(cases, run), _signals() as signals, _aside(progress) as tell, ExitStack() as ending:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = _context(kind, ENGINES[cases[0].engine].path)
        team = _Team(cases, tell, signals)
        ending.callback(team.kill)
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            arguments = (cases, kind, rank, store.port, run, writer)
            member = context.Process(target=process.train_cases, args=arguments)  # a loader's workers are its own
            with _silent():
                member.start()
            writer.close()
            team.add(member, reader)
        return team.results()


@contextmanager
def _owned(cases: Sequence[TrainOptions], run: str) -> Iterator[None]:
    """Own all folders that the cases save to. Raises OptionsError where another run does."""
    with ExitStack() as owning:
        for folder in sorted({Path(options.save).resolve() for options in cases if options.save is not None}):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                owning.enter_context(owned(folder, run, lambda line: _say(f"--save {line}")))
            except Disturbed as error:
                raise OptionsError(f"--save {error}") from None
        yield


@contextmanager
def _aside(progress: Progress) -> Iterator[Progress]:
    """Call `progress` from a thread of its own: what it waits for, such as a terminal, holds up no training."""
    told = SimpleQueue[Iteration | None]()

    def tell() -> None:
        for done in iter(told.get, None):
            progress(done)

    thread = threading.Thread(target=tell, name="evenpipe-progress", daemon=True)
    thread.start()
    try:
        yield told.put
    finally:
        told.put(None)
        thread.join()


def _say(line: str) -> None:
    print(f"evenpipe: {printable(line)}", file=sys.stderr, flush=True)


def _context(kind: str, engine: str) -> ForkServerContext | SpawnContext:
    """A fork server imports torch and the engine once for all processes; CUDA needs processes of their own."""
    # A signal to all processes (Ctrl-C, a terminal that closes, a scheduler) reaches the server and the tracker of
    # resources too. Without the server nobody learns how processes end that are still saving; both end with their
    # launcher.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        with _silent():
            resource_tracker.ensure_running()
            if kind == "cuda" or "forkserver" not in multiprocessing.get_all_start_methods():
                return multiprocessing.get_context("spawn")
            # The tracker's start has unblocked two of them.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            multiprocessing.set_forkserver_preload(["evenpipe.train.process", engine])
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return multiprocessing.get_context("forkserver")


@contextmanager
def _silent() -> Iterator[None]:
    """Have processes that start inside write to nobody: megatron-core warns of every missing optional package."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # what is buffered is the caller's, and would go to nobody too
    kept = {}
    for number in (1, 2):
        with suppress(OSError):  # it is closed
            kept[number] = os.dup(number)
    with open(os.devnull, "wb") as nobody:
        for number in kept:
            os.dup2(nobody.fileno(), number)
    try:
        yield
    finally:
        for number, file in kept.items():
            os.dup2(file, number)
            os.close(file)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that end a run only join this list inside."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = (*STOPPING, signal.SIGQUIT)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Team:
    """The processes that train `cases`, by rank, and what they have reported; `signals` are those that came here."""

    def __init__(self, cases: tuple[TrainOptions, ...], progress: Progress, signals: list[int]) -> None:
        self._cases = cases
        self._progress = progress
        self._signals = signals
        self._saves = any(options.save is not None for options in cases)
        self._processes: list[BaseProcess] = []
        self._readers: list[Connection] = []
        self._failures: list[Failure] = []
        self._saved: Path | None = None
        self._stopping: int | None = None
        self._results: list[RunResult] = []
        self._statuses: dict[int, int] = {}  # of the processes that have failed, by rank, the first to fail first

    def add(self, process: BaseProcess, reader: Connection) -> None:
        self._processes.append(process)
        self._readers.append(reader)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()  # also one that has been stopped
            process.join()

    def results(self) -> list[RunResult]:
        """Wait for all processes. Raises what `run_cases` does."""
        passed_on, deadline = False, float("inf")
        while self._readers or any(process.exitcode is None for process in self._processes):
            running = [process.sentinel for process in self._processes if process.exitcode is None]
            for ready in wait([*self._readers, *running], _POLL_SECONDS):
                if isinstance(ready, Connection):
                    self._read(ready)
            for rank, process in enumerate(self._processes):
                if process.exitcode and rank not in self._statuses:
                    self._statuses[rank] = process.exitcode
            if self._signals and not passed_on:
                passed_on = True
                if not self._saves:
                    break  # nothing is waited for
                for process in self._processes:
                    if process.exitcode is None and process.pid is not None:
                        with suppress(ProcessLookupError):  # it has ended, and nobody has said so yet
                            os.kill(process.pid, self._signals[0])
            if signal.SIGQUIT in self._signals or signal.SIGINT in self._signals[1:]:
                break  # a second Ctrl-C, say: the save is not waited for
            left = self._stopping is not None and any(process.exitcode is not None for process in self._processes)
            if self._failures or self._statuses or left:
                deadline = min(deadline, time.monotonic() + _NOTICE_SECONDS)
            if time.monotonic() > deadline:
                break
        self.kill()
        if (error := self._error()) is not None:
            raise error
        return self._results

    def _read(self, reader: Connection) -> None:
        try:
            report = reader.recv()
        except (EOFError, OSError):
            self._readers.remove(reader)
            return
        if isinstance(report, Iteration):
            self._progress(report)
        elif isinstance(report, Note):
            _say(report.text)
        elif isinstance(report, Saved):
            self._saved = report.folder
        elif isinstance(report, Failure):
            self._failures.append(report)
        elif isinstance(report, Stopping):
            self._stopping = report.number  # which came to a process, perhaps not to its parent
        elif isinstance(report, Results):
            self._results += report.runs  # rank 0's: the others have none

    def _error(self) -> StageFailed | OptionsError | Stopped | None:
        """Return what ended the run: a signal, the first process that died without a word, or the earliest error."""
        ended = self._statuses.items()
        signals = self._signals or ([] if self._stopping is None else [self._stopping])
        if signals:
            # A run that saves goes on for a moment, in which it may fail; any other loses processes to the signal.
            by_signal = signal.SIGQUIT in signals or any(-status in signals for _, status in ended)
            if not self._saves or by_signal or not (self._failures or ended):
                return Stopped(signals[0], self._saved)
        for rank, status in ended:
            if status < 0:
                name = signal.Signals(-status).name
                return StageFailed(f"stage {self._stage(rank)} failed: its process was killed by {name}")
        if self._failures:
            first = min(self._failures)
            return OptionsError(first.error) if first.of_options else StageFailed(str(first), first.traceback)
        for rank, status in ended:
            return StageFailed(f"stage {self._stage(rank)} failed at start-up: its process ended with status {status}")
        return None

    def _stage(self, rank: int) -> int:
        return rank // (self._cases[0].data_parallel * self._cases[0].tensor_parallel)
