"""What a step needs of a batch's gradients, for each kind of DeepSpeed's optimizers: kept from its last backward on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

__all__ = ["Gradients", "gradients_of"]

_PIECE: Final = 1 << 24  # numbers


class Gradients(ABC):
    """The gradients of one stage, for one kind of optimizer.

    `counted`: the step needs the norm over all stages, of which `squares` is this one's part. `skips`: a step whose
    norm is no number is skipped. `sharded`: each replica keeps a part of them. `weights` are tensors beside the
    parameters that the optimizer reads or writes the weights through.
    """

    counted = False
    skips = True
    sharded = False
    weights: tuple[Tensor, ...] = ()

    @abstractmethod
    def keep(self) -> None:
        """Take the batch's gradients, which have been reduced between replicas, out of the next one's way."""

    @abstractmethod
    def kept(self, weight: Tensor) -> Tensor | None:
        """What is kept for `weight`; None where it has no gradient.

        To be changed in place, or, if sharded, a copy with zeros for what other replicas keep, for `put_back`.
        """

    def put_back(self, weight: Tensor, gradient: Tensor) -> None:
        """What `kept` gave for `weight` has been changed."""
        assert not self.sharded, "a copy has to be put back"

    def held_bytes(self, waits: bool) -> int:
        """What keeping takes; `waits`: until the next batch's gradients are added up."""
        return 0

    @abstractmethod
    def squares(self) -> Tensor:
        """The sum of squares of what is kept, without what another stage counts; no number if one of them is none.

        A double of no dimension on the device, so that the host need not wait for the batch's last backward.
        """

    @abstractmethod
    def step(self, step: Callable[[], Any], norm: float) -> None:
        """Let `step` see what was kept, and `norm` for the norm over all stages; it is gone then."""

    def scaled(self, loss: Tensor) -> Tensor:
        """A loss whose backward pass makes these gradients; as it is where DeepSpeed scales it, or nothing has to."""
        return loss


def gradients_of(engine: Any) -> Gradients | None:
    """Those of `engine`'s optimizer; None for a kind that is not known here."""
    optimizer, parameters = engine.optimizer, engine.module.parameters()
    if isinstance(optimizer, BF16_Optimizer):
        return FlatGradients(optimizer) if optimizer.using_real_optimizer else None
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        beside = optimizer.cpu_offload or optimizer.use_grad_accum_attribute
        return None if beside else ShardedGradients(optimizer, parameters)
    if isinstance(optimizer, FP16_Optimizer):
        return None if optimizer.fused_adam_legacy else HalfGradients(optimizer, parameters)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return None if optimizer.fused_lamb_legacy else HalfGradients(optimizer, parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        return PlainGradients(parameters, engine.gradient_clipping())
    return None


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
        return _sum_of_squares(zip(self._parameters, self._kept, strict=True))

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
        # In the place of DeepSpeed's `CheckOverflow`, which would ask the other stages.
        optimizer.overflow_checker = SimpleNamespace(check=lambda: overflow, has_overflow=lambda parameters: overflow)
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
        return _sum_of_squares((weight, self.kept(weight)) for group in self._optimizer.bf16_groups for weight in group)

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


def _sum_of_squares(gradients: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Of all gradients, given with their weights, but of tied weights that another stage counts; a double."""
    counted = [
        gradient
        for weight, gradient in gradients
        if gradient is not None and not getattr(weight, "ds_pipe_replicated", False)
    ]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in counted]
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
