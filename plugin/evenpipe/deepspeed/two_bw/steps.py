"""Steps of DeepSpeed's optimizer that are submitted in one `train_batch` and finished in the next."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from evenpipe.deepspeed.two_bw.gradients import Gradients
from evenpipe.deepspeed.two_bw.ties import Ties
from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.weight_versions import WeightVersions
from evenpipe.two_bw.steps import LossScale, Outcome, TwoBWSteps

__all__ = ["EngineSteps"]


class EngineSteps(TwoBWSteps):
    """The optimizer of one stage of `engine`.

    At the end of a batch, DeepSpeed's own code counts it, moves the learning rate on and calls `optimizer.step`, which
    submits the step: tied weights' gradients and the norm travel in the background.
    """

    def __init__(self, engine: Any, gradients: Gradients) -> None:
        self._optimizer = optimizer = engine.optimizer
        self._gradients = gradients
        self._ties = Ties(engine, gradients)
        self._norm = 0.0  # of gradients that are multiplied by the loss scale
        fp16 = engine.fp16_enabled()
        super().__init__(
            WeightVersions(list(engine.module.parameters()), gradients.weights),
            Exchange(engine.grid.get_pipe_parallel_group(), 1, engine.device) if gradients.counted else None,
            LossScale(lambda: optimizer.loss_scale, optimizer._update_scale) if fp16 else None,
            decides=gradients.counted,
            waits=gradients.counted or bool(self._ties),
        )
        gradients.start(waits=not self.update_early(engine.stage_id))

    @property
    def held_gradient_bytes(self) -> int:
        """As `two_bw.held` says, where steps wait."""
        return self._gradients.held_bytes() if self._gradients.waits else 0

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss`, for its backward pass."""
        return self._gradients.scaled(loss)

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Inside, `optimizer.step` submits."""
        # A learning-rate scheduler of torch's puts a step of its own there, and warns where it is gone or not called.
        own = vars(self._optimizer).get("step")
        self._optimizer.step = functools.wraps(self._optimizer.step)(lambda *_, **__: self.submit())
        self._optimizer._opt_called = True
        try:
            yield
        finally:
            del self._optimizer.step
            if own is not None:
                self._optimizer.step = own

    def close(self) -> None:
        """Let go of what was made for this among the ranks; nothing is under way."""
        self._ties.close()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        super().load_state_dict(state)
        if hasattr(self._optimizer, "overflow"):
            self._optimizer.overflow = not self.outcome.updated

    def _groups(self) -> Sequence[dict[str, Any]]:
        groups: Sequence[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def _start_reducing(self) -> None:
        self._gradients.keep()

    def _figures(self) -> Tensor:
        self._ties.start()
        self._ties.finish(counted=True)
        return self._gradients.squares().view(1)

    def _finish_reducing(self) -> None:
        self._ties.finish()

    def _outcome(self, rows: list[list[float]]) -> Outcome:
        self._norm = math.sqrt(sum(squares for (squares,) in rows))
        updated = math.isfinite(self._norm) or not self._gradients.skips
        scale = 1.0 if self._loss_scale is None else float(self._loss_scale.submitted)
        return Outcome(updated, self._norm / scale if updated else None, None)

    def _step(self, update: bool) -> None:
        # Whether to is in the norm, which is no number then.
        with self._as_submitted():
            self._gradients.step(self._optimizer.step, self._norm)

    @contextmanager
    def _as_submitted(self) -> Iterator[None]:
        """Inside, the loss scale is that of the submitted batch, and stays it."""
        if self._loss_scale is None:
            yield
            return
        optimizer = self._optimizer
        present, optimizer.loss_scale = optimizer.loss_scale, self._loss_scale.submitted
        # Learnt later. And DeepSpeed would divide the gradients by the next scale in a step that makes it grow.
        optimizer._update_scale = lambda overflow: None
        try:
            yield
        finally:
            del optimizer._update_scale
            optimizer.loss_scale = present
