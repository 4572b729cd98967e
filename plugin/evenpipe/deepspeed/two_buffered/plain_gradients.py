"""Gradients that wait in the parameters' `.grad`: fp32, and fp16, without ZeRO."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from evenpipe.deepspeed.two_buffered.gradients import Gradients, sum_of_squares

__all__ = ["HalfGradients", "PlainGradients"]


class PlainGradients(Gradients):
    """fp32: one of torch's optimizers, which reads them there. They are clipped to a norm of `clip`; 0: not at all."""

    def __init__(self, parameters: Iterable[Tensor], clip: float) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._kept: list[Tensor | None] = []
        self._clip = clip
        self.counted = clip > 0
        self.skips = False

    def keep(self) -> None:
        self._kept = self._exchanged([None] * len(self._parameters))

    def kept(self, weight: Tensor) -> Tensor | None:
        kept = zip(self._parameters, self._kept, strict=True)
        return next((gradient for parameter, gradient in kept if parameter is weight), None)

    def held_bytes(self, waits: bool) -> int:
        return sum(parameter.nbytes for parameter in self._parameters) if waits else 0

    def squares(self) -> Tensor:
        return sum_of_squares(zip(self._parameters, self._kept, strict=True))

    def step(self, step: Callable[[], Any], norm: float) -> None:
        if self._clip > 0:
            # As DeepSpeed does it, which counts the first stage only: with no number for a norm, nothing is one after.
            factor = torch.clamp(self._clip / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0)
            for gradient in self._kept:
                if gradient is not None:
                    gradient.mul_(factor.to(gradient.device))
        following = self._exchanged(self._kept)
        step()
        self._exchanged(following)
        self._kept = []

    def _exchanged(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return before


class HalfGradients(PlainGradients):
    """fp16: DeepSpeed's `optimizer` makes fp32 gradients of them in a step, and looks for an overflow, clips, unscales.

    It does not have losses scaled, though it divides gradients by the scale, so that is done here.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, clip=0.0)
        self.counted = self.skips = True  # an overflow is found in the norm
        self._optimizer = optimizer
        self.weights = tuple(getattr(optimizer, "fp16_groups_flat", ()))

    def step(self, step: Callable[[], Any], norm: float) -> None:
        optimizer = self._optimizer
        overflow = not math.isfinite(norm)
        unscale, checker, mpu = optimizer.unscale_and_clip_grads, optimizer.overflow_checker, optimizer.mpu
        # Both kinds give the norm last; the one that they would find is this stage's.
        optimizer.unscale_and_clip_grads = lambda *gradients_and_norm: unscale(*gradients_and_norm[:-1], norm)
        optimizer.overflow_checker = _KnownOverflow(overflow)
        optimizer.mpu = None
        try:
            super().step(step, norm)
        finally:
            optimizer.mpu = mpu
            optimizer.overflow_checker = checker
            del optimizer.unscale_and_clip_grads
        optimizer._global_grad_norm = float("inf") if overflow else norm / optimizer.loss_scale

    def scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = loss.float() * self._optimizer.loss_scale
        return scaled


class _KnownOverflow:
    """In the place of DeepSpeed's `CheckOverflow`, which would ask the other stages."""

    def __init__(self, overflow: bool) -> None:
        self._overflow = overflow

    def check(self) -> bool:
        return self._overflow

    def has_overflow(self, parameters: Any) -> bool:
        return self._overflow
