"""Gradients of ZeRO-1, of which each replica keeps a part in the optimizer, away from the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from evenpipe.deepspeed.two_buffered.gradients import Gradients

__all__ = ["ShardedGradients"]


class ShardedGradients(Gradients):
    """ZeRO-1 in fp32 and fp16, and in bf16 where gradients are added up in bf16: else see `FlatGradients`."""

    counted = True
    sharded = True

    def __init__(self, optimizer: Any, parameters: Iterable[Tensor]) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self.weights = (
            *optimizer.bit16_groups_flat,
            *(part for parts in optimizer.parallel_partitioned_bit16_groups for part in parts),
        )
        # What crosses stages travels in the background. A stage that finds an overflow has no number for a norm, and so
        # all of them skip the step.
        optimizer._model_parallel_all_reduce = lambda tensor, op: None

    def keep(self) -> None:
        """The optimizer has."""

    def kept(self, weight: Tensor) -> Tensor | None:
        whole: Tensor | None = None
        for part, piece in self._pieces(weight):
            whole = torch.zeros(weight.numel(), dtype=piece.dtype, device=piece.device) if whole is None else whole
            whole[part] = piece.reshape(-1)
        dtype = self._optimizer.gradient_accumulation_dtype
        return torch.zeros(weight.numel(), dtype=dtype, device=weight.device) if whole is None else whole

    def put_back(self, weight: Tensor, gradient: Tensor) -> None:
        for part, piece in self._pieces(weight):
            piece.copy_(gradient[part].view_as(piece))

    def squares(self) -> Tensor:
        optimizer = self._optimizer
        norms = torch.stack(
            [
                optimizer.get_grad_norm_direct(optimizer.averaged_gradients[group], parameters).double()
                for group, parameters in enumerate(optimizer.params_in_partition)
            ]
        )
        return norms.square().masked_fill(norms < 0, math.nan).sum()  # DeepSpeed says -1 where it is no number

    def step(self, step: Callable[[], Any], norm: float) -> None:
        optimizer = self._optimizer
        following = [parameter.grad for parameter in self._parameters]
        known = torch.tensor(norm, dtype=torch.float32, device=optimizer.device)

        def check_overflow(partition_gradients: bool = True) -> None:
            optimizer.overflow = not math.isfinite(norm)

        optimizer.scaled_global_norm = lambda: known
        optimizer.check_overflow = check_overflow
        try:
            step()
        finally:
            del optimizer.scaled_global_norm, optimizer.check_overflow
        for parameter, gradient in zip(self._parameters, following, strict=True):
            parameter.grad = gradient

    def _pieces(self, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """What this replica keeps of the gradient of `weight`, and which part of it that is."""
        optimizer = self._optimizer
        for group, parameters in enumerate(optimizer.params_in_partition):
            kept = (one for one in optimizer.averaged_gradients[group] if not getattr(one, "_zero_padding", False))
            # Padding may follow that is not marked. A replica's part may begin within its first parameter.
            for place, (parameter, piece) in enumerate(zip(parameters, kept, strict=False)):
                if parameter is weight:
                    start = optimizer.first_offset[group] if place == 0 else 0
                    yield slice(start, start + piece.numel()), piece
