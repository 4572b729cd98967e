"""Steps of DeepSpeed's optimizer that are submitted in one `train_batch` and finished in the next."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.deepspeed.two_buffered.gradients import Gradients
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
        self._ties: list[tuple[Tensor, dist.ProcessGroup]] = engine.module.get_tied_weights_and_groups()
        # A tied weight is counted by the first stage that has it.
        self._counts_ties = any(min(comm["ranks"]) == dist.get_rank() for comm in engine.module.tied_comms.values())
        self._exchange: Exchange | None = None
        if gradients.counted:
            self._exchange = Exchange(engine.grid.get_pipe_parallel_group(), 1, engine.device)
        self._stage_id: int = engine.stage_id
        self._settings: list[dict[str, Any]] | None = None
        self._tying: list[dist.Work] = []

    @property
    def update_early(self) -> bool:
        """Whether a step can be finished before the next batch's first backward, as stage 0 is the last to end one."""
        return self._stage_id == 0 or not (self._ties or self._gradients.counted)

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
        self._wait_for_ties()
        norm = math.sqrt(sum(squares for (squares,) in self._exchange.finish())) if self._exchange else 0.0
        with self.versions.writing(), as_submitted(self._optimizer.param_groups, settings):
            self._gradients.step(self._optimizer.step, norm)

    def restart(self, before: list[Tensor] | None) -> None:
        """Go on from weights that have been loaded, and the version before them; None: both are these."""
        self.batch = 0 if before is None else 1
        self.versions.restart(self.batch, before)

    @torch.no_grad()
    def _submit(self) -> None:
        assert self._settings is None, "the schedule finishes one step before the next is submitted"
        self._settings = [settings_of(group) for group in self._optimizer.param_groups]
        self.batch += 1
        self._gradients.keep()
        self._tying = []
        for weight, group in self._ties:
            gradient = self._gradients.kept(weight)
            if gradient is not None:
                work = dist.all_reduce(gradient, group=group, async_op=True)
                assert work is not None
                self._tying.append(work)
        if self._exchange is not None:
            if self._counts_ties:
                # Of the sum. Later stages have given their part: they end a batch earlier.
                self._wait_for_ties()
            self._exchange.start([self._gradients.squares()])

    def _wait_for_ties(self) -> None:
        for work in self._tying:
            work.wait()
        self._tying = []
