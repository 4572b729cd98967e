"""A batch's gradients, kept from its last backward to its step, for each kind of optimizer that DeepSpeed makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

__all__ = ["FlatGradients", "Gradients", "PlainGradients", "ShardedGradients", "gradients_of"]


class Gradients(ABC):
    """`counted`: the step needs the norm over all stages, of which `squares` is this one's part.

    `weights` are tensors beside the parameters that the optimizer reads or writes the weights through.
    """

    counted = False
    weights: tuple[Tensor, ...] = ()

    @abstractmethod
    def keep(self) -> None:
        """Take the batch's gradients, which have been reduced between replicas, out of the next one's way."""

    @abstractmethod
    def kept(self, weight: Tensor) -> Tensor | None:
        """What is kept for `weight`, to be changed in place; None where it has no gradient."""

    @abstractmethod
    def squares(self) -> float:
        """The sum of squares of what is kept, without what another stage counts."""

    @abstractmethod
    def step(self, step: Callable[[], Any], norm: float) -> None:
        """Let `step` see what was kept, and `norm` for the norm over all stages; it is gone then."""


class PlainGradients(Gradients):
    """fp32, no ZeRO: one of torch's optimizers, which reads the parameters' `.grad`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._kept: list[Tensor | None] = []

    def keep(self) -> None:
        self._kept = self._exchanged([None] * len(self._parameters))

    def kept(self, weight: Tensor) -> Tensor | None:
        kept = zip(self._parameters, self._kept, strict=True)
        return next((gradient for parameter, gradient in kept if parameter is weight), None)

    def squares(self) -> float:
        raise AssertionError("clipping is refused")

    def step(self, step: Callable[[], Any], norm: float) -> None:
        following = self._exchanged(self._kept)
        step()
        self._exchanged(following)
        self._kept = []

    def _exchanged(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return before


class FlatGradients(Gradients):
    """bf16 without ZeRO, or with ZeRO-1 and fp32 gradients: they add up in flat buffers beside the parameters."""

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

    def squares(self) -> float:
        weights = [weight for group in self._optimizer.bf16_groups for weight in group]
        counted = [self.kept(weight) for weight in weights if not getattr(weight, "ds_pipe_replicated", False)]
        norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in counted if one is not None]
        return float(torch.stack(norms).double().square().sum()) if norms else 0.0

    def step(self, step: Callable[[], Any], norm: float) -> None:
        optimizer = self._optimizer
        following = self._exchange(self._there)
        all_of, mpu = optimizer.get_grads_for_norm, optimizer.mpu
        told = torch.tensor([norm], dtype=torch.float32, device=self._flat[0].device)
        # The norm of what it is given as the gradients, over no other process, is the one that was told.
        optimizer.get_grads_for_norm = lambda for_clipping=False: all_of(True) if for_clipping else ([told], {})
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
            present = flat.clone()
            flat.copy_(kept)
            kept.copy_(present)
        self._optimizer.fp32_groups_has_gradients[:] = there
        return before


class ShardedGradients(Gradients):
    """ZeRO-1: reducing them leaves this replica's shard in the optimizer, away from the parameters.

    In bf16 DeepSpeed comes here if gradients are added up in bf16, and else to `FlatGradients`.
    """

    counted = True

    def __init__(self, optimizer: Any, parameters: Iterable[Tensor]) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self.weights = (
            *optimizer.bit16_groups_flat,
            *(part for parts in optimizer.parallel_partitioned_bit16_groups for part in parts),
        )
        # What crosses stages is told in the background. A stage that finds an overflow has no number for a norm, and so
        # all of them skip the step.
        optimizer._model_parallel_all_reduce = lambda tensor, op: None

    def keep(self) -> None:
        """The optimizer has."""

    def kept(self, weight: Tensor) -> Tensor | None:
        raise AssertionError("tied layers are refused")

    def squares(self) -> float:
        norm = float(self._optimizer.scaled_global_norm())
        return norm**2 if norm >= 0 else float("nan")  # DeepSpeed says -1 where it is no number

    def step(self, step: Callable[[], Any], norm: float) -> None:
        optimizer = self._optimizer
        following = [parameter.grad for parameter in self._parameters]
        told = torch.tensor(norm, dtype=torch.float32, device=optimizer.device)
        optimizer.scaled_global_norm = lambda: told
        try:
            step()
        finally:
            del optimizer.scaled_global_norm
        for parameter, gradient in zip(self._parameters, following, strict=True):
            parameter.grad = gradient


def gradients_of(engine: Any) -> Gradients | None:
    """Those of `engine`'s optimizer; None for a kind that is not known here."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        return FlatGradients(optimizer) if optimizer.using_real_optimizer else None
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        beside = optimizer.cpu_offload or optimizer.use_grad_accum_attribute
        return None if beside else ShardedGradients(optimizer, engine.module.parameters())
    return PlainGradients(engine.module.parameters()) if isinstance(optimizer, torch.optim.Optimizer) else None
