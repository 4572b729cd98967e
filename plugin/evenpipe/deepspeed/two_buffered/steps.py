"""Steps of DeepSpeed's optimizer that are submitted in one `train_batch` and finished in the next."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from evenpipe.deepspeed.two_buffered.gradients import Gradients
from evenpipe.deepspeed.two_buffered.loss_scale import LossScale
from evenpipe.deepspeed.two_buffered.ties import Ties
from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.step_settings import as_submitted, settings_of
from evenpipe.runtime.weight_versions import WeightVersions

__all__ = ["DeferredSteps"]


class DeferredSteps:
    """W(t+1) = W(t) - step of the gradients at W(t-1) (PipeDream-2BW §3.1), for the optimizer of one stage of `engine`.

    At the end of a batch, DeepSpeed's own code counts it, moves the learning rate on and calls `optimizer.step`, which
    *submits* the step: tied weights' gradients and the norm travel in the background. The step is *finished*, with the
    learning rate of its own batch, where the schedule has it: what other stages tell is there by then.
    """

    def __init__(self, engine: Any, gradients: Gradients) -> None:
        self._optimizer = engine.optimizer
        self._gradients = gradients
        parameters = list(engine.module.parameters())
        self.versions = WeightVersions(parameters, gradients.weights)
        self.batch = 0  # submitted so far; the first one that runs on two equal versions is 0
        self._ties = Ties(engine, gradients)
        self._loss_scale = LossScale(engine.optimizer) if engine.fp16_enabled() else None
        self._exchange: Exchange | None = None
        if gradients.counted:
            self._exchange = Exchange(engine.grid.get_pipe_parallel_group(), 1, engine.device)
        self._stage_id: int = engine.stage_id
        self._settings: list[dict[str, Any]] | None = None

    @property
    def update_early(self) -> bool:
        """Whether a step can be finished before the next batch's first backward, as stage 0 is the last to end one."""
        return self._stage_id == 0 or not (self._ties or self._gradients.counted)

    @property
    def skipped(self) -> bool:
        """Whether the last step that was finished left the weights as they were, for a gradient that is no number."""
        return bool(getattr(self._optimizer, "overflow", False))

    def start_batch(self) -> None:
        """The batch begins that is submitted next."""
        if self._loss_scale is not None:
            self._loss_scale.start_batch(self.batch)

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss`, for its backward pass."""
        return self._gradients.scaled(loss)

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Inside, `optimizer.step` submits."""
        # A learning-rate scheduler of torch's puts a step of its own there, and warns where it is gone or not called.
        own = vars(self._optimizer).get("step")
        self._optimizer.step = functools.wraps(self._optimizer.step)(lambda *_, **__: self._submit())
        self._optimizer._opt_called = True
        try:
            yield
        finally:
            del self._optimizer.step
            if own is not None:
                self._optimizer.step = own

    @torch.no_grad()
    def finish(self) -> None:
        """Write the weights of the submitted step over the older version; nothing to do without one."""
        if self._settings is None:
            return
        settings, self._settings = self._settings, None
        self._ties.finish()
        norm = math.sqrt(sum(squares for (squares,) in self._exchange.finish())) if self._exchange else 0.0
        scale = self._loss_scale.as_submitted(self.batch - 1) if self._loss_scale is not None else nullcontext()
        with self.versions.writing(), as_submitted(self._optimizer.param_groups, settings), scale:
            self._gradients.step(self._optimizer.step, norm)

    def close(self) -> None:
        """Let go of what was made for this among the ranks; nothing is under way."""
        self._ties.close()

    def drain(self) -> None:
        """Finish the submitted step, and leave the newest weights."""
        self.finish()
        self.versions.use(self.versions.latest)
        self.start_batch()  # a checkpoint is to have what the scaler knows then

    def restart(self, before: list[Tensor] | None, skipped: bool = False) -> None:
        """Go on from weights that have been loaded, and the version before them; None: both are these.

        `skipped` is what it was when they were saved.
        """
        self.batch = 0 if before is None else 1
        self.versions.restart(self.batch, before)
        if self._loss_scale is not None:
            self._loss_scale.restart(self.batch, skipped)
        if hasattr(self._optimizer, "overflow"):
            self._optimizer.overflow = skipped

    @torch.no_grad()
    def _submit(self) -> None:
        assert self._settings is None, "the schedule finishes one step before the next is submitted"
        self._settings = [settings_of(group) for group in self._optimizer.param_groups]
        self.batch += 1
        if self._loss_scale is not None:
            self._loss_scale.submit()
        self._gradients.keep()
        self._ties.start()
        if self._exchange is not None:
            self._ties.finish_counted()
            self._exchange.start(self._gradients.squares().view(1))
