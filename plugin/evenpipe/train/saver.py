"""When a run saves, and all its processes together doing so."""

from __future__ import annotations

import hashlib
import io
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenpipe.report.files import lacks_room
from evenpipe.runtime.exchange import Exchange
from evenpipe.train.checkpoint import FORMAT, Checkpoint, Draft, FileEntry, damaged, find, rank_file, refuse_misfit
from evenpipe.train.engine import Case, Engine
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.ownership import Disturbed
from evenpipe.train.result import STOPPING

__all__ = ["Agreement", "NotSaved", "Saver", "StopRequest", "load", "state_of"]


class NotSaved(RuntimeError):
    """A checkpoint could not be written; the one before is as it was. The message is one line."""


class StopRequest:
    """From now on signals of STOPPING do not end this process: the first only sets `number`. Needs the main thread."""

    def __init__(self) -> None:
        self.number: int | None = None
        for number in STOPPING:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.number = self.number or number


class Agreement:
    """All processes learn that one of them has been asked to stop, at the same iteration, and none waits for it.

    What a process says after an iteration is read by all after the next one: by then everybody has said it.
    """

    def __init__(self, request: StopRequest, exchange: Exchange) -> None:
        self._request = request
        self._exchange = exchange

    def to_stop(self) -> bool:
        """Called by all processes after each iteration: whether this one is the last."""
        agreed = self.end()
        if not agreed:
            self._exchange.start([float(self._request.number is not None)])
        return agreed

    def end(self) -> bool:
        """Leave nothing under way; whether somebody had been asked to stop before the last iteration but one ended."""
        return self._exchange.under_way and any(asked for (asked,) in self._exchange.finish())


@dataclass(frozen=True)
class Saver:
    """Saves one process' part of `run`, which owns the folder of --save.

    `saved` is called with the folder of each checkpoint, on rank 0.
    """

    case: Case
    engine: Engine
    agreement: Agreement
    group: dist.ProcessGroup
    run: str
    saved: Callable[[Path], None]

    def ends_after(self, iterations: int) -> bool:
        """So many iterations are done: save if it is time to. Whether the run is to end here."""
        options = self.case.options
        end = self.agreement.to_stop() or iterations == options.iterations
        due = end or (options.save_interval and iterations % options.save_interval == 0)
        if due:
            # Before anybody waits for all: a stage may be amid transfers with a partner who has gone no further.
            self.engine.drain()
        if end:
            self.agreement.end()
        if due:
            self.save(iterations)
        return end

    def save(self, iterations: int) -> None:
        """All processes save what they need to go on after so many iterations, amid nothing. Raises NotSaved."""
        self.case.failure.enter("saving")
        assert self.case.options.save is not None
        draft = Draft(Path(self.case.options.save), iterations, self.run)
        rank = dist.get_rank(self.group)
        [draft.partial, *_] = self._together(draft, draft.begin if rank == 0 else None)
        contents = io.BytesIO()
        identity = {"format": FORMAT, "run": self.run, "iteration": iterations, "rank": rank}
        torch.save({**identity, "state": self.engine.state()}, contents)
        entry = FileEntry(bytes=contents.tell(), sha256=hashlib.sha256(contents.getbuffer()).hexdigest())

        def write() -> FileEntry:
            draft.write(rank_file(rank), lambda file: file.write(contents.getbuffer()))
            return entry

        files = {rank_file(number): written for number, written in enumerate(self._together(draft, write))}
        self._together(draft, (lambda: draft.complete(self.case.options, files)) if rank == 0 else None)
        if rank == 0:
            self.saved(draft.final)

    def _together(self, draft: Draft, act: Callable[[], Any] | None) -> list[Any]:
        """Return what each process' act gave, once all have acted. When one could not, there is no draft any more."""
        failed, given = None, None
        try:
            if act is not None:
                given = act()
        except Disturbed as error:
            failed = f"--save {error}"
        except OSError as error:
            reason = f"{error.filename or draft.partial}: {error.strerror or error}"
            room = "make room, or " if lacks_room(error) else ""
            failed = f"--save {draft.final.parent}: {reason}: {room}save elsewhere"
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, (failed, given), group=self.group)
        failures = [failure for failure, _ in every if failure is not None]
        if not failures:
            return [one for _, one in every]
        if dist.get_rank(self.group) == 0:
            draft.discard()
        dist.barrier(group=self.group)
        if failed is None:
            # The error of the process that failed is to be the first of the run.
            time.sleep(0.2)
        raise NotSaved(failed or failures[0])


def load(options: TrainOptions, engine: Engine, group: dist.ProcessGroup | None, note: Callable[[str], None]) -> int:
    """Restore what --load names, if anything; how many iterations are done then. `note` shows the user a line.

    `group` holds all ranks and moves host memory; None: the default group does. The first finds the checkpoint for all:
    while another run saves, each by itself might find another. Raises OptionsError where there is no checkpoint, where
    it is damaged, or where it does not fit.
    """
    if options.load is None:
        return 0
    found: list[Checkpoint | OptionsError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = [find(Path(options.load))]
        except OptionsError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0, group=group)
    [checkpoint] = found
    if not isinstance(checkpoint, Checkpoint):
        raise checkpoint or OptionsError(f"--load {options.load}: nothing was found")
    refuse_misfit(options, checkpoint)
    rank = dist.get_rank()
    state = state_of(checkpoint, rank)
    try:
        changed = engine.restore(state)
    except OptionsError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = f"the model here cannot take it over, {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise damaged(checkpoint.folder / rank_file(rank), reason) from error
    if changed is not None:
        note(f"--load {checkpoint.folder}: {changed}")
    return checkpoint.iterations


def state_of(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return what `Engine.state` gave in that process, once it is known to be just that. Raises OptionsError."""
    name = rank_file(rank)
    path = checkpoint.folder / name
    with checkpoint.opened(name) as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises whatever its parts do
            raise damaged(path, f"torch.load cannot read it, {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise damaged(path, "it holds no state of a run")
    identity = {"format": FORMAT, "run": checkpoint.manifest.run, "iteration": checkpoint.iterations, "rank": rank}
    for key, expected in identity.items():
        if content.get(key) != expected:
            raise damaged(path, f"it is of {key} {content.get(key)}, not {expected}")
    state = content.get("state")
    if not isinstance(state, dict):
        raise damaged(path, "it holds no state of a run")
    return state
