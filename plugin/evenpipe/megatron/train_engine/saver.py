"""When a run saves, and all its processes together doing so."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenpipe.megatron.train_engine.engines import Engine
from evenpipe.megatron.train_engine.state import capture, restore
from evenpipe.megatron.train_engine.step import Learner
from evenpipe.train.checkpoint import Draft, find, rank_file, refuse_misfit
from evenpipe.train.flags import OptionsError
from evenpipe.train.options import TrainOptions
from evenpipe.train.stopping import Agreement
from evenpipe.train.whereabouts import Whereabouts

__all__ = ["NotSaved", "Saver", "load"]


class NotSaved(RuntimeError):
    """A checkpoint could not be written; the one before is as it was. The message is one line."""


class Saver:
    """Saves one process' part of a run with --save. `saved` is told of each checkpoint, on rank 0."""

    def __init__(
        self,
        learner: Learner,
        whereabouts: Whereabouts,
        agreement: Agreement,
        group: dist.ProcessGroup,
        saved: Callable[[Path], None],
    ) -> None:
        assert learner.options.save is not None
        self._directory = Path(learner.options.save)
        self._learner = learner
        self._whereabouts = whereabouts
        self._agreement = agreement
        self._group = group
        self._saved = saved

    def ends_after(self, iterations: int, engine: Engine) -> bool:
        """So many iterations are done: save if it is time to. Whether the run is to end here."""
        options = self._learner.options
        end = self._agreement.to_stop() or iterations == options.iterations
        due = end or (options.save_interval and iterations % options.save_interval == 0)
        if due and engine.extra is not None:
            # Before anybody waits for all: a stage may be amid transfers with a partner who has gone no further.
            engine.extra.drain()
        if end:
            self._agreement.end()
        if due:
            self.save(iterations, engine)
        return end

    def save(self, iterations: int, engine: Engine) -> None:
        """All processes save what they need to go on after so many iterations, amid nothing. Raises NotSaved."""
        self._whereabouts.enter("saving")
        draft, rank = Draft(self._directory, iterations), dist.get_rank(self._group)
        self._together(draft, draft.begin if rank == 0 else None)
        contents = io.BytesIO()
        torch.save(capture(self._learner, engine), contents)
        self._together(draft, lambda: draft.write(rank_file(rank), lambda file: file.write(contents.getbuffer())))
        self._together(draft, (lambda: draft.complete(self._learner.options)) if rank == 0 else None)
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
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, failed, group=self._group)
        if not any(told):
            return
        if dist.get_rank(self._group) == 0:
            draft.discard()
        dist.barrier(group=self._group)
        if failed is None:
            # Who failed speaks first.
            time.sleep(0.2)
        raise NotSaved(f"--save {self._directory}: {failed or next(filter(None, told))}: make room, or save elsewhere")


def load(learner: Learner, engine: Engine, rank: int, tell: Callable[[str], None]) -> int:
    """Restore what --load names, if anything; how many iterations are done then. `tell` gets what the user must know.

    Raises OptionsError where there is no checkpoint, where it is damaged, or where it does not fit.
    """
    options: TrainOptions = learner.options
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
    note = restore(learner, engine, state)
    if note is not None:
        tell(f"--load {checkpoint.folder}: {note}")
    return checkpoint.iterations
