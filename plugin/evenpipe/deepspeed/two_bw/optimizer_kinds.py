"""The gradients of each kind of DeepSpeed's optimizers, kept from a batch's last backward until its step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from evenpipe.deepspeed.two_bw.gradients import EngineGradients
from evenpipe.two_bw.gradients import ParameterGradients, held_gradient_bytes

__all__ = ["FlatGradients", "HalfGradients", "PlainGradients", "ShardedGradients", "kind_of"]


def kind_of(engine: Any) -> type[PlainGradients | HalfGradients | FlatGradients | ShardedGradients] | None:
    """Return the kind for `engine`'s optimizer; None for one that is not known here."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        return FlatGradients if optimizer.using_real_optimizer else None
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        beside = optimizer.cpu_offload or optimizer.use_grad_accum_attribute
        return None if beside else ShardedGradients
    if isinstance(optimizer, FP16_Optimizer):
        return None if optimizer.fused_adam_legacy else HalfGradients
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return None if optimizer.fused_lamb_legacy else HalfGradients
    return PlainGradients if isinstance(optimizer, torch.optim.Optimizer) else None


class _OwnGradients(EngineGradients):
    """Gradients that lie with the parameters."""

    def __init__(self, engine: Any, decides: bool, weights: Sequence[Tensor] = ()) -> None:
        super().__init__(engine, decides, weights)
        self._parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        self._own = ParameterGradients()

    def reduce(self) -> None:
        self._own.keep(self._parameters)

    def kept(self, weight: Tensor) -> Tensor | None:
        return next((gradient for parameter, gradient in self._own.kept if parameter is weight), None)

    def _bytes(self) -> int:
        return sum(held_gradient_bytes(weight.numel(), weight.element_size(), 1) for weight in self._parameters)

    def _squares(self) -> Tensor:
        kept = [(weight, gradient) for weight, gradient in self._own.kept if _is_counted(weight)]
        return self._sum_of_squares([(weight, self._norm_of(weight, gradient)) for weight, gradient in kept])

    def _step(self, step: Callable[[], Any], norm: float) -> None:
        with self._own.in_place():
            step()
        self._own.let_go()


class PlainGradients(_OwnGradients):
    """fp32: one of torch's optimizers, which reads them there."""

    skips = False

    def __init__(self, engine: Any) -> None:
        self._clip: float = engine.gradient_clipping()  # to this norm; 0: not at all
        super().__init__(engine, decides=self._clip > 0)

    def _step(self, step: Callable[[], Any], norm: float) -> None:
        if self._clip > 0:
            # As DeepSpeed does it, which counts the first stage only: with no number for a norm, nothing is one after.
            factor = torch.clamp(self._clip / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0)
            for _, gradient in self._own.kept:
                gradient.mul_(factor.to(gradient.device))
        super()._step(step, norm)


class HalfGradients(_OwnGradients):
    """fp16: DeepSpeed's `optimizer` makes fp32 gradients of them in a step, and looks for an overflow, clips, unscales.

    It does not have losses scaled, though it divides gradients by the scale, so that is done here.
    """

    def __init__(self, engine: Any) -> None:
        # An overflow is found in the norm.
        super().__init__(engine, decides=True, weights=getattr(engine.optimizer, "fp16_groups_flat", ()))

    def _step(self, step: Callable[[], Any], norm: float) -> None:
        optimizer = self._optimizer
        overflow = not math.isfinite(norm)
        unscale, checker = optimizer.unscale_and_clip_grads, optimizer.overflow_checker
        # Both kinds give the norm last; the one that they would find is this stage's.
        optimizer.unscale_and_clip_grads = lambda *gradients_and_norm: unscale(*gradients_and_norm[:-1], norm)
        # In the place of DeepSpeed's `CheckOverflow`, which would ask the other stages.
        optimizer.overflow_checker = SimpleNamespace(check=lambda: overflow, has_overflow=lambda parameters: overflow)
        try:
            with _alone(optimizer):
                super()._step(step, norm)
        finally:
            optimizer.overflow_checker = checker
            del optimizer.unscale_and_clip_grads
        optimizer._global_grad_norm = float("inf") if overflow else norm / optimizer.loss_scale

    def scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = loss.float() * self._optimizer.loss_scale
        return scaled


class _Tied(NamedTuple):
    """The gradient of a tied weight: `whole` until stages have summed it, and `own`, the `part` of it in the shard."""

    group: int
    place: int
    whole: Tensor
    own: Tensor
    part: slice


class FlatGradients(EngineGradients):
    """bf16 without ZeRO, or with ZeRO-1 and fp32 gradients.

    DeepSpeed sums all gradients up on each replica, for the norm, which steps with its shard of them. So the shard and
    the norms are kept, and of tied weights, whose sums over stages are still to come, all.
    """

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        partitioned = optimizer.bf16_partitioned_groups
        super().__init__(engine, decides=True, weights=[*optimizer.bf16_groups_flat, *_parts(partitioned)])
        tied = {id(weight) for weight, _ in engine.module.get_tied_weights_and_groups()}
        present = optimizer.fp32_groups_gradient_flat_partition
        self._shards = [torch.empty_like(shard) if self.held else shard for shard in present]
        self._tied = {
            id(weight): self._of_tied(group, place)
            for group, weights in enumerate(optimizer.bf16_groups)
            for place, weight in enumerate(weights)
            if id(weight) in tied
        }
        self._norms: list[tuple[Tensor, Tensor]] = []
        self._there: list[list[bool]] = []

    def _of_tied(self, group: int, place: int) -> _Tied:
        gradient = self._optimizer.fp32_groups_gradients[group][place]
        start = gradient.storage_offset() - self._optimizer.fp32_groups_gradient_flat_partition[group].storage_offset()
        own = self._shards[group][max(start, 0) : max(start + gradient.numel(), 0)]
        whole = gradient
        if self.held:
            whole = own if own.numel() == gradient.numel() else torch.empty_like(gradient)
        return _Tied(group, place, whole, own, slice(max(-start, 0), max(-start, 0) + own.numel()))

    def reduce(self) -> None:
        optimizer = self._optimizer
        self._there = [list(there) for there in optimizer.fp32_groups_has_gradients]
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, self._there, strict=True)
        self._norms = [
            (weight, self._norm_of(weight, gradient))
            for group in groups
            for weight, gradient, is_there in zip(*group, strict=True)
            if is_there and _is_counted(weight)
        ]
        if not self.held:
            optimizer.clear_hp_grads = lambda: None  # DeepSpeed would, as if they had been stepped with
            return
        for shard, present in zip(self._shards, optimizer.fp32_groups_gradient_flat_partition, strict=True):
            shard.copy_(present)
        for tied in self._tied.values():
            tied.whole.copy_(optimizer.fp32_groups_gradients[tied.group][tied.place])
        optimizer.clear_hp_grads()

    def kept(self, weight: Tensor) -> Tensor | None:
        tied = self._tied[id(weight)]
        return tied.whole if self._there[tied.group][tied.place] else None

    def put_back(self, weight: Tensor, gradient: Tensor) -> None:
        tied = self._tied[id(weight)]
        tied.own.copy_(gradient[tied.part])

    def _bytes(self) -> int:
        flat = zip(self._optimizer.fp32_groups_gradients_flat, self._optimizer.partition_count, strict=True)
        shards = sum(held_gradient_bytes(group.numel(), group.element_size(), replicas) for group, replicas in flat)
        return shards + sum(tied.whole.nbytes for tied in self._tied.values() if tied.whole is not tied.own)

    def _squares(self) -> Tensor:
        return self._sum_of_squares(
            [
                (weight, self._norm_of(weight, self._tied[id(weight)].whole) if id(weight) in self._tied else norm)
                for weight, norm in self._norms
            ]
        )

    def _step(self, step: Callable[[], Any], norm: float) -> None:
        optimizer = self._optimizer
        present = optimizer.fp32_groups_gradient_flat_partition
        known = torch.tensor([norm], dtype=torch.float32, device=self._shards[0].device)
        optimizer.fp32_groups_gradient_flat_partition = self._shards
        # The norm of what it is given as the gradients, over no other process, is the one that is known.
        optimizer.get_grads_for_norm = lambda for_clipping=False: self._shards if for_clipping else ([known], {})
        optimizer.clear_hp_grads = lambda: None  # they are the next batch's
        try:
            with _alone(optimizer):
                step()
        finally:
            del optimizer.clear_hp_grads, optimizer.get_grads_for_norm
            optimizer.fp32_groups_gradient_flat_partition = present
            if not self.held:
                optimizer.clear_hp_grads()


class ShardedGradients(EngineGradients):
    """ZeRO-1 in fp32 and fp16, and in bf16 where gradients are added up in bf16: else see `FlatGradients`."""

    sharded = True

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        partitioned = optimizer.parallel_partitioned_bit16_groups
        super().__init__(engine, decides=True, weights=[*optimizer.bit16_groups_flat, *_parts(partitioned)])
        self._parameters = list(engine.module.parameters())
        # What crosses stages travels in the background. A stage that finds an overflow has no number for a norm, and so
        # all of them skip the step.
        optimizer._model_parallel_all_reduce = lambda tensor, op: None

    def reduce(self) -> None:
        """The optimizer has, but as views into all gradients of each parameter that begins or ends elsewhere."""
        kept = self._optimizer.averaged_gradients
        for group, pieces in kept.items() if self.held else ():
            kept[group] = _packed(pieces)

    def _bytes(self) -> int:
        optimizer = self._optimizer
        element = optimizer.gradient_accumulation_dtype.itemsize
        flat = zip(optimizer.bit16_groups_flat, optimizer.partition_count, strict=True)
        return sum(held_gradient_bytes(group.numel(), element, replicas) for group, replicas in flat)

    def kept(self, weight: Tensor) -> Tensor | None:
        pieces = list(self._pieces(weight))
        dtype = pieces[0][1].dtype if pieces else self._optimizer.gradient_accumulation_dtype
        whole = torch.zeros(weight.numel(), dtype=dtype, device=weight.device)
        for part, piece in pieces:
            whole[part] = piece.reshape(-1)
        return whole

    def put_back(self, weight: Tensor, gradient: Tensor) -> None:
        for part, piece in self._pieces(weight):
            piece.copy_(gradient[part].view_as(piece))

    def _squares(self) -> Tensor:
        optimizer = self._optimizer
        squares = self._counted()
        if (shard := optimizer.model_parallel_rank) > 0:
            optimizer.model_parallel_rank = 0  # which counts all: an overflow in what the first one counts is one here
            squares = squares + 0 * self._counted()
            optimizer.model_parallel_rank = shard
        return squares

    def _counted(self) -> Tensor:
        optimizer = self._optimizer
        norms = torch.stack(
            [
                optimizer.get_grad_norm_direct(optimizer.averaged_gradients[group], parameters).double()
                for group, parameters in enumerate(optimizer.params_in_partition)
            ]
        )
        return norms.square().masked_fill(norms < 0, math.nan).sum()  # DeepSpeed says -1 where it is no number

    def _step(self, step: Callable[[], Any], norm: float) -> None:
        optimizer = self._optimizer
        following = [parameter.grad for parameter in self._parameters]
        known = torch.tensor(norm, dtype=torch.float32, device=optimizer.device)

        def check_overflow(partition_gradients: bool = True) -> None:
            optimizer.overflow = not math.isfinite(norm)

        optimizer.scaled_global_norm = lambda: known
        optimizer.check_overflow = check_overflow
        # Releases before 0.19.8 look for an overflow in fp16 only; a section "bf16" may turn it on or off.
        looks, optimizer.check_grad_overflow = optimizer.check_grad_overflow, True
        try:
            step()
        finally:
            optimizer.check_grad_overflow = looks
            del optimizer.scaled_global_norm, optimizer.check_overflow
        for parameter, gradient in zip(self._parameters, following, strict=True):
            parameter.grad = gradient

    def _pieces(self, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Give each part of the gradient of `weight` that this replica keeps: where it is, and its values."""
        optimizer = self._optimizer
        for group, parameters in enumerate(optimizer.params_in_partition):
            averaged = optimizer.averaged_gradients[group]
            kept = (gradient for gradient in averaged if not getattr(gradient, "_zero_padding", False))
            # Padding may follow that is not marked. A replica's part may begin within its first parameter.
            for place, (parameter, piece) in enumerate(zip(parameters, kept, strict=False)):
                if parameter is weight:
                    start = optimizer.first_offset[group] if place == 0 else 0
                    yield slice(start, start + piece.numel()), piece


@contextmanager
def _alone(optimizer: Any) -> Iterator[None]:
    """Inside, `optimizer` asks no other process for its part of the norm."""
    asks = {"mpu": None, "has_moe_layers": False}
    before = {name: value for name, value in vars(optimizer).items() if name in asks}
    vars(optimizer).update({name: asks[name] for name in before})
    try:
        yield
    finally:
        vars(optimizer).update(before)


def _parts(groups: Iterable[Iterable[Tensor]]) -> Iterable[Tensor]:
    return itertools.chain.from_iterable(groups)


def _packed(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Copies of `pieces` that share memory of their size."""
    together = torch.cat([piece.reshape(-1) for piece in pieces])
    copies = torch.split(together, [piece.numel() for piece in pieces])
    packed = [copy.view_as(piece) for copy, piece in zip(copies, pieces, strict=True)]
    for copy, piece in zip(packed, pieces, strict=True):
        if hasattr(piece, "_zero_padding"):
            copy._zero_padding = True  # type: ignore[attr-defined]
    return packed


def _is_counted(weight: Tensor) -> bool:
    """Return whether this stage counts its gradient, and not another stage that has the weight too."""
    return not getattr(weight, "ds_pipe_replicated", False)
