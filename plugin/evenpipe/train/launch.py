"""Start the processes of training runs with torchrun's API; bring back results, or the failure that came first."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from evenpipe.train.engines import ENGINES
from evenpipe.train.journal import Failure, Iteration, JournalReader, Note, Saved
from evenpipe.train.machine import check_room
from evenpipe.train.options import OptionsError, TrainOptions, device_type
from evenpipe.train.ownership import Disturbed, owned
from evenpipe.train.result import RunResult
from evenpipe.train.stopping import STOPPING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["Progress", "StageFailed", "Stopped", "run_cases"]

Progress = Callable[[Iteration], None]

_POLL_SECONDS: Final = 0.05
_AGENT_LOGGERS: Final = ("torch.distributed.elastic", "torch.multiprocessing")


class StageFailed(RuntimeError):
    """A stage raised, or its process died; the message is one line. `details` is its traceback or what it printed."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class Stopped(RuntimeError):
    """A signal told the parent to end; the processes of the run have ended. `saved` is their last checkpoint."""

    def __init__(self, number: int, saved: Path | None = None) -> None:
        how_to_go_on = f": saved {saved}: go on with --load {saved.parent}" if saved is not None else ""
        super().__init__(f"stopped by {signal.Signals(number).name}{how_to_go_on}")
        self.number = number


def run_cases(cases: Sequence[TrainOptions], progress: Progress = lambda iteration: None) -> list[RunResult]:
    """Train every case; consecutive ones of one world size and engine package share processes. Results in their order.

    `progress` is called from another thread, with the number of the case among all. All processes have ended when this
    returns or raises. Raises StageFailed for the failure that came first, OptionsError where that is one of the options
    which only a run could find, and Stopped when SIGINT, SIGTERM, SIGHUP or
    SIGQUIT ends the run (in the main thread: others get no signals).
    """
    results: list[RunResult] = []

    def numbered(done: Iteration) -> None:
        progress(done._replace(case=len(results) + done.case))

    try:
        for _, together in groupby(cases, key=_processes):
            results += _run_together(tuple(together), numbered)
    except KeyboardInterrupt:
        # Before the agent is there, whose handlers make a SignalException of it.
        raise Stopped(signal.SIGINT) from None
    return results


def _processes(options: TrainOptions) -> tuple[int, str]:
    """Cases with the same can run in the same processes, one after the other."""
    return options.world_size, ENGINES[options.engine].path


def _run_together(cases: tuple[TrainOptions, ...], progress: Progress) -> list[RunResult]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from evenpipe.train.process import train_cases

    world_size = cases[0].world_size
    check_room(world_size)
    kind, run = device_type(world_size), uuid.uuid4().hex
    with (
        _owned(cases, run),
        tempfile.TemporaryDirectory(prefix="evenpipe-") as folder,
        _signals_restored(),
        _quiet(),
    ):
        journal = Path(folder, "journal")
        journal.mkdir()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=run,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method=_start_method(kind, f"{ENGINES[cases[0].engine].path}.preload"),
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder, "logs")), redirects=Std.ALL),
        )
        ended: SignalException | ChildFailedError
        with _read_on(journal, progress) as reported:
            try:
                returned = elastic_launch(config, train_cases)(cases, kind, str(journal), run)
            except (SignalException, ChildFailedError) as error:
                ended = error
            else:
                return list(returned[0])
        raise _why(ended, reported, cases)


def _say_of_save(line: str) -> None:
    print(f"evenpipe: --save {line}", file=sys.stderr, flush=True)


@contextmanager
def _owned(cases: Sequence[TrainOptions], run: str) -> Iterator[None]:
    """Own all folders that the cases save to. Raises OptionsError where another run does."""
    with ExitStack() as owning:
        for folder in sorted({Path(options.save).resolve() for options in cases if options.save is not None}):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                owning.enter_context(owned(folder, run, _say_of_save))
            except Disturbed as error:
                raise OptionsError(f"--save {error}") from None
        yield


def _start_method(kind: str, preload: str) -> str:
    """A fork server imports torch and the engine once for all processes; CUDA needs processes of their own."""
    # A signal to all processes (Ctrl-C, a terminal that closes, a scheduler) reaches the server and the tracker of
    # resources too. Without the server the agent takes processes that are still saving for dead; both end with their
    # launcher.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        resource_tracker.ensure_running()
        if kind == "cuda" or "forkserver" not in multiprocessing.get_all_start_methods():
            return "spawn"
        # The tracker's start has unblocked two of them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        multiprocessing.set_forkserver_preload([preload])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # The first process is there once the server has imported; told to end until then, the agent would leave it behind.
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()
    first.join()
    return "forkserver"


class _Reported(NamedTuple):
    """Failures, and the folders of checkpoints, in the order in which they were read."""

    failures: list[Failure]
    saved: list[Path]


@contextmanager
def _read_on(journal: Path, progress: Progress) -> Iterator[_Reported]:
    """Read the journal from a thread: iterations go to `progress`, notes to standard error, and the rest into the
    result, which is complete after the block."""
    reported = _Reported([], [])
    reader, done = JournalReader(journal), threading.Event()

    def read() -> None:
        for entry in reader.new_entries():
            if isinstance(entry, Failure):
                reported.failures.append(entry)
                _continue_what_was_stopped(journal)
            elif isinstance(entry, Saved):
                reported.saved.append(Path(entry.folder))
            elif isinstance(entry, Note):
                print(f"evenpipe: {entry.text}", file=sys.stderr)
            else:
                progress(entry)

    def keep_reading() -> None:
        while not done.wait(_POLL_SECONDS):
            read()
        read()

    thread = threading.Thread(target=keep_reading, name="evenpipe-journal", daemon=True)
    thread.start()
    try:
        yield reported
    finally:
        done.set()
        thread.join()


def _continue_what_was_stopped(journal: Path) -> None:
    """The run is over: a process that was stopped takes the agent's signal at once, and not half a minute later."""
    for path in journal.glob("*.pid"):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(path.read_text()), signal.SIGCONT)


def _why(
    ended: SignalException | ChildFailedError, reported: _Reported, cases: tuple[TrainOptions, ...]
) -> StageFailed | OptionsError | Stopped:
    """What to raise for what the agent raised."""
    from torch.distributed.elastic.multiprocessing import SignalException

    saved = reported.saved[-1] if reported.saved else None
    if isinstance(ended, SignalException):
        # A run that saves goes on for a moment, in which it may fail; any other loses processes to the signal itself.
        could_not_save = reported.failures and any(options.save is not None for options in cases)
        return _as_reported(reported.failures) if could_not_save else Stopped(ended.sigval, saved)
    status = ended.get_first_failure()[1].exitcode
    if not reported.failures and status in [128 + number for number in STOPPING]:
        # The signal came to a process rather than to the agent.
        return Stopped(status - 128, saved)
    return _first_failure(reported.failures, ended, cases)


def _first_failure(
    failures: Sequence[Failure], agent_error: ChildFailedError, cases: tuple[TrainOptions, ...]
) -> StageFailed | OptionsError:
    """What ended the run: the earliest error reported, unless the agent saw a process die that had reported none."""
    rank, died = agent_error.get_first_failure()
    if failures and died.exitcode > 0:
        return _as_reported(failures)
    stage = rank // (cases[0].data_parallel * cases[0].tensor_parallel)
    if died.exitcode < 0:
        return StageFailed(f"stage {stage} failed: its process was killed by {signal.Signals(-died.exitcode).name}", "")
    said = died.message["message"] if isinstance(died.message, dict) else died.message
    return StageFailed(f"stage {stage} failed at start-up: {str(said).strip().partition(chr(10))[0]}", "")


def _as_reported(failures: Sequence[Failure]) -> StageFailed | OptionsError:
    first = min(failures)
    return OptionsError(first.error) if first.of_options else StageFailed(str(first), first.traceback)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent sets handlers for the signals that end it, and leaves them behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, handlers, strict=True):
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent reports a failure in some forty lines; ours is one."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(_AGENT_LOGGERS)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
