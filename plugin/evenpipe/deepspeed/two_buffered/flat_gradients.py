"""Gradients of bf16 weights that add up in flat buffers beside the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from evenpipe.deepspeed.two_buffered.gradients import Gradients, sum_of_squares

__all__ = ["FlatGradients"]

_PIECE: Final = 1 << 24  # numbers


class FlatGradients(Gradients):
    """bf16 without ZeRO, or with ZeRO-1 and fp32 gradients."""

    counted = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.weights = (
            *optimizer.bf16_groups_flat,
            *(part for parts in optimizer.bf16_partitioned_groups for part in parts),
        )
        self._flat: list[Tensor] = optimizer.fp32_groups_gradients_flat
        self._kept = [torch.zeros_like(flat) for flat in self._flat]
        self._there: list[list[bool]] = []
        self._views = {
            id(weight): (group, place, view)
            for group, (weights, kept) in enumerate(zip(optimizer.bf16_groups, self._kept, strict=True))
            for place, (weight, view) in enumerate(
                zip(weights, optimizer._split_flat_tensor(kept, [one.numel() for one in weights]), strict=True)
            )
        }

    def keep(self) -> None:
        self._there = [list(there) for there in self._optimizer.fp32_groups_has_gradients]
        for flat, kept in zip(self._flat, self._kept, strict=True):
            kept.copy_(flat)
        self._optimizer.clear_hp_grads()

    def kept(self, weight: Tensor) -> Tensor | None:
        group, place, view = self._views[id(weight)]
        return view if self._there[group][place] else None

    def held_bytes(self, waits: bool) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def squares(self) -> Tensor:
        return sum_of_squares((weight, self.kept(weight)) for group in self._optimizer.bf16_groups for weight in group)

    def step(self, step: Callable[[], Any], norm: float) -> None:
        optimizer = self._optimizer
        following = self._exchange(self._there)
        all_of, mpu = optimizer.get_grads_for_norm, optimizer.mpu
        known = torch.tensor([norm], dtype=torch.float32, device=self._flat[0].device)
        # The norm of what it is given as the gradients, over no other process, is the one that is known.
        optimizer.get_grads_for_norm = lambda for_clipping=False: all_of(True) if for_clipping else ([known], {})
        optimizer.mpu = None
        try:
            step()
        finally:
            optimizer.mpu = mpu
            del optimizer.get_grads_for_norm
        self._exchange(following)

    def _exchange(self, there: list[list[bool]]) -> list[list[bool]]:
        before = [list(one) for one in self._optimizer.fp32_groups_has_gradients]
        for flat, kept in zip(self._flat, self._kept, strict=True):
            # Piece by piece: the gradients are not to be there a third time.
            for one, other in zip(torch.split(flat, _PIECE), torch.split(kept, _PIECE), strict=True):
                present = one.clone()
                one.copy_(other)
                other.copy_(present)
        self._optimizer.fp32_groups_has_gradients[:] = there
        return before
