"""fp16 under 2BW: a batch keeps the loss scale that it began with until its step, while the scaler learns of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LossScales"]


class LossScales:
    """The loss scale of each batch under way.

    A step is finished in the middle of the next batch, on each stage at another micro-batch. So what the scaler learns
    from it is for the batches that have not begun: all stages agree which.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._scalers = [scaler for one in optimizers if (scaler := getattr(one, "grad_scaler", None)) is not None]
        self._of: dict[int, Tensor] = {}
        self._present: Tensor | None = None

    @property
    def any(self) -> bool:
        """Whether losses are scaled at all."""
        return bool(self._scalers)

    def start_batch(self, batch: int) -> None:
        """The call of `batch` begins."""
        if self._scalers:
            self._present = self._of[batch] = self._scalers[0].scale.clone()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """`loss` times the scale of the batch whose losses are being computed."""
        return loss if self._present is None else self._present * loss

    def of(self, batch: int) -> Tensor | None:
        """The scale of a batch whose step is to come; None without scaling."""
        return self._of.get(batch)

    def prepare(self, optimizer: Any, batch: int) -> None:
        """Megatron's `prepare_grads` with the scale of `batch`, all of whose gradients are finite."""
        if getattr(optimizer, "grad_scaler", None) is None:
            optimizer.prepare_grads()
            return
        optimizer._copy_model_grads_to_main_grads()
        gradients = optimizer._collect_main_grad_data_for_unscaling()
        torch._foreach_mul_(gradients, self._of[batch].double().reciprocal().float().squeeze())

    def step_ended(self, batch: int, overflow: bool) -> None:
        """The scaler learns whether `batch` had a value that was not finite."""
        self._of.pop(batch, None)
        for scaler in self._scalers:
            scaler.update(overflow)
