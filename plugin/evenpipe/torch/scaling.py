"""A gradient scaler for fp16 in a pipeline: what overflows on one stage is skipped on all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.torch.base import Pipeline
from evenpipe.two_bw.gradients import LossScale

__all__ = ["PipelineScaler"]


class PipelineScaler(torch.amp.GradScaler):
    """torch's `GradScaler` for the optimizer of one stage of a pipeline; from now on the pipeline scales its losses.

    Call `unscale_`, `step` and `update` as usual, but not `scale`: `pipeline.step` does that. Stages exchange whether a
    gradient is not finite, so all ranks of the pipeline call them alike, and have the same scale. With replicas,
    average the gradients before. Under 2bw call none of them: `two_bw` does what they do, a batch late, and a skipped
    step changes the scale for the batch after the next. `arguments`: those of `GradScaler` but for the device.
    """

    def __init__(self, pipeline: Pipeline, **arguments: Any) -> None:
        super().__init__(pipeline.device.type, **arguments)
        if pipeline.versions is not None and pipeline.versions.in_place:
            name = pipeline.program.schedule.name
            raise ValueError(f"{name}: a stage's step waits for no other's overflow: train in bf16 or fp32")
        self._pipeline = pipeline
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(pipeline.device)
            pipeline.scaler = self
            if pipeline.versions is not None:
                pipeline.loss_scale = LossScale(self._present, self._learn)

    def _present(self) -> Tensor:
        """Return a copy of the scale, without a wait of the host for its device."""
        one: Tensor = self.scale(torch.ones((), device=self._pipeline.device))
        return one

    def _learn(self, overflow: bool) -> None:
        """Change the scale, as `update` does it after a step."""
        found = torch.full((), float(overflow), device=self._pipeline.device)
        self._per_optimizer_states[0]["found_inf_per_device"] = {found.device: found}
        self.update()

    def _unscale_grads_(self, *arguments: Any) -> dict[torch.device, Tensor]:
        """Unscale this stage's gradients; return whether any stage found one that is not finite: 1.0 or 0.0."""
        if self._pipeline.loss_scale is not None:
            raise ValueError("2bw: two_bw unscales the gradients and steps: leave step and unscale_ out of the loop")
        device = self._pipeline.device
        mine = super()._unscale_grads_(*arguments)
        found = torch.stack([torch.zeros((), device=device), *(one.to(device) for one in mine.values())]).amax()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._pipeline.group)
        return {device: found}
