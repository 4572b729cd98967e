"""What a step needs of a batch's gradients, for each kind of DeepSpeed's optimizers: kept from its last backward on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from evenpipe.two_bw.held import held_gradient_bytes

__all__ = ["Gradients", "gradients_of"]


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
    waits = True

    def start(self, waits: bool) -> None:
        """Before the first batch. `waits`: the next batch's gradients are added up before the step of these."""
        self.waits = waits

    @abstractmethod
    def keep(self) -> None:
        """Take the batch's gradients, which have been reduced between replicas, out of the next one's way."""

    @abstractmethod
    def kept(self, weight: Tensor) -> Tensor | None:
        """What is kept for the tied `weight`; None where it has no gradient.

        To be changed in place, for `put_back`; if sharded, with zeros for what other replicas keep.
        """

    def put_back(self, weight: Tensor, gradient: Tensor) -> None:
        """What `kept` gave for `weight` has been changed."""
        assert not self.sharded, "a copy has to be put back"

    @abstractmethod
    def held_bytes(self) -> int:
        """What takes memory until then where it waits: g · N / d (`two_bw.held`), and what tied weights add."""

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
        tied = [weight for weight, _ in engine.module.get_tied_weights_and_groups()]
        return FlatGradients(optimizer, tied) if optimizer.using_real_optimizer else None
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

    def held_bytes(self) -> int:
        return sum(held_gradient_bytes(one.numel(), one.element_size(), 1) for one in self._parameters)

    def squares(self) -> Tensor:
        kept = zip(self._parameters, self._kept, strict=True)
        return _sum_of_squares([_norm(one) for weight, one in kept if one is not None and _is_counted(weight)])

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


class _Tied(NamedTuple):
    """The gradient of a tied weight: `whole` until stages have summed it, and `own`, the `part` of it in the shard."""

    group: int
    place: int
    whole: Tensor
    own: Tensor
    part: slice


class FlatGradients(Gradients):
    """bf16 without ZeRO, or with ZeRO-1 and fp32 gradients; `tied` are the weights that other stages have too.

    DeepSpeed sums all gradients up on each replica, for the norm, which steps with its shard of them. So the shard and
    the norms are kept, and of tied weights, whose sums over stages are still to come, all.
    """

    counted = True

    def __init__(self, optimizer: Any, tied: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self.weights = (
            *optimizer.bf16_groups_flat,
            *(part for parts in optimizer.bf16_partitioned_groups for part in parts),
        )
        self._places = {
            id(weight): (group, place)
            for group, weights in enumerate(optimizer.bf16_groups)
            for place, weight in enumerate(weights)
            if any(weight is one for one in tied)
        }
        self._tied: dict[int, _Tied] = {}
        self._shards: list[Tensor] = []
        self._norms: list[tuple[Tensor, Tensor]] = []
        self._there: list[list[bool]] = []

    def start(self, waits: bool) -> None:
        super().start(waits)
        present = self._optimizer.fp32_groups_gradient_flat_partition
        self._shards = [torch.empty_like(shard) if waits else shard for shard in present]
        self._tied = {key: self._of_tied(*place) for key, place in self._places.items()}

    def _of_tied(self, group: int, place: int) -> _Tied:
        gradient = self._optimizer.fp32_groups_gradients[group][place]
        start = gradient.storage_offset() - self._optimizer.fp32_groups_gradient_flat_partition[group].storage_offset()
        own = self._shards[group][max(start, 0) : max(start + gradient.numel(), 0)]
        whole = gradient
        if self.waits:
            whole = own if own.numel() == gradient.numel() else torch.empty_like(gradient)
        return _Tied(group, place, whole, own, slice(max(-start, 0), max(-start, 0) + own.numel()))

    def keep(self) -> None:
        optimizer = self._optimizer
        self._there = [list(there) for there in optimizer.fp32_groups_has_gradients]
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, self._there, strict=True)
        self._norms = [
            (weight, _norm(gradient))
            for group in groups
            for weight, gradient, is_there in zip(*group, strict=True)
            if is_there and _is_counted(weight)
        ]
        if not self.waits:
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

    def held_bytes(self) -> int:
        flat = zip(self._optimizer.fp32_groups_gradients_flat, self._optimizer.partition_count, strict=True)
        shards = sum(held_gradient_bytes(one.numel(), one.element_size(), replicas) for one, replicas in flat)
        return shards + sum(tied.whole.nbytes for tied in self._tied.values() if tied.whole is not tied.own)

    def squares(self) -> Tensor:
        tied = self._tied
        return _sum_of_squares([_norm(tied[id(one)].whole) if id(one) in tied else norm for one, norm in self._norms])

    def step(self, step: Callable[[], Any], norm: float) -> None:
        optimizer = self._optimizer
        present, mpu = optimizer.fp32_groups_gradient_flat_partition, optimizer.mpu
        known = torch.tensor([norm], dtype=torch.float32, device=self._shards[0].device)
        optimizer.fp32_groups_gradient_flat_partition = self._shards
        # The norm of what it is given as the gradients, over no other process, is the one that is known.
        optimizer.get_grads_for_norm = lambda for_clipping=False: self._shards if for_clipping else ([known], {})
        optimizer.clear_hp_grads = lambda: None  # they are the next batch's
        optimizer.mpu = None
        try:
            step()
        finally:
            optimizer.mpu = mpu
            del optimizer.clear_hp_grads, optimizer.get_grads_for_norm
            optimizer.fp32_groups_gradient_flat_partition = present
            if not self.waits:
                optimizer.clear_hp_grads()


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
        """The optimizer has, but as views into all gradients of each parameter that begins or ends elsewhere."""
        kept = self._optimizer.averaged_gradients
        for group, pieces in kept.items() if self.waits else ():
            kept[group] = _packed(pieces)

    def held_bytes(self) -> int:
        optimizer = self._optimizer
        element = optimizer.gradient_accumulation_dtype.itemsize
        flat = zip(optimizer.bit16_groups_flat, optimizer.partition_count, strict=True)
        return sum(held_gradient_bytes(one.numel(), element, replicas) for one, replicas in flat)

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
    """Whether this stage counts its gradient, and not another one that has the weight too."""
    return not getattr(weight, "ds_pipe_replicated", False)


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def _sum_of_squares(norms: list[Tensor]) -> Tensor:
    """A double."""
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
