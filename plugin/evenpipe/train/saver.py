"""When a run saves, and all its processes together doing so."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenpipe.train.checkpoint import Draft, find, rank_file, refuse_misfit
from evenpipe.train.engine import Case, Engine
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.stopping import Agreement

__all__ = ["NotSaved", "Saver", "load"]


class NotSaved(RuntimeError):
    """A checkpoint could not be written; the one before is as it was. The message is one line."""


class Saver:
    """Saves one process' part of a run with --save. `saved` is called with the folder of each checkpoint, on rank 0."""

    def __init__(
        self,
        case: Case,
        engine: Engine,
        agreement: Agreement,
        group: dist.ProcessGroup,
        saved: Callable[[Path], None],
    ) -> None:
        assert case.options.save is not None
        self._directory = Path(case.options.save)
        self._case = case
        self._engine = engine
        self._agreement = agreement
        self._group = group
        self._saved = saved

    def ends_after(self, iterations: int) -> bool:
        """So many iterations are done: save if it is time to. Whether the run is to end here."""
        options = self._case.options
        end = self._agreement.to_stop() or iterations == options.iterations
        due = end or (options.save_interval and iterations % options.save_interval == 0)
        if due:
            # Before anybody waits for all: a stage may be amid transfers with a partner who has gone no further.
            self._engine.drain()
        if end:
            self._agreement.end()
        if due:
            self.save(iterations)
        return end

    def save(self, iterations: int) -> None:
        """All processes save what they need to go on after so many iterations, amid nothing. Raises NotSaved."""
        self._case.failure.enter("saving")
        draft, rank = Draft(self._directory, iterations), dist.get_rank(self._group)
        self._together(draft, draft.begin if rank == 0 else None)
        contents = io.BytesIO()
        torch.save(self._engine.state(), contents)
        self._together(draft, lambda: draft.write(rank_file(rank), lambda file: file.write(contents.getbuffer())))
        self._together(draft, (lambda: draft.complete(self._case.options)) if rank == 0 else None)
        if rank == 0:
            self._saved(draft.final)

    def _together(self, draft: Draft, act: Callable[[], None] | None) -> None:
        """All processes get here, and go on when each has acted. When one could not, there is no draft any more."""
        failed: str | None = None
        try:
            if act is not None:
                act()
        except OSError as error:
            failed = f"{error.filename or draft.partial}: {error.strerror or error}"
        failures: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(failures, failed, group=self._group)
        if not any(failures):
            return
        if dist.get_rank(self._group) == 0:
            draft.discard()
        dist.barrier(group=self._group)
        if failed is None:
            # The error of the process that failed is to be the first of the run.
            time.sleep(0.2)
        raise NotSaved(
            f"--save {self._directory}: {failed or next(filter(None, failures))}: make room, or save elsewhere"
        )


def load(options: TrainOptions, engine: Engine, rank: int, note: Callable[[str], None]) -> int:
    """Restore what --load names, if anything; how many iterations are done then. `note` shows the user a line.

    Raises OptionsError where there is no checkpoint, where it is damaged, or where it does not fit.
    """
    if options.load is None:
        return 0
    checkpoint = find(Path(options.load))
    refuse_misfit(options, checkpoint)
    path = checkpoint.folder / rank_file(rank)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise OptionsError(f"--load {path}: the checkpoint is damaged ({reason}): name another") from None
    changed = engine.restore(state)
    if changed is not None:
        note(f"--load {checkpoint.folder}: {changed}")
    return checkpoint.iterations
