"""The gradients of a batch, from its last backward to its step: reduced, counted, kept out of the next one's way."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from evenpipe.runtime.heartbeat import hearing, wait_for
from evenpipe.two_bw.held import held_gradient_bytes

__all__ = [
    "OwnGradients",
    "Reduction",
    "bucket_groups",
    "buffers",
    "local_figures",
    "stepping_with_own",
    "tied_embedding",
]


def buffers(model: Sequence[Any]) -> list[Any]:
    """All flat buffers of Megatron's DDP chunks; those of experts that are shared out have replicas of their own."""
    return [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def bucket_groups(model: Sequence[Any]) -> list[Any]:
    """What of these buffers is reduced, or gathered, together."""
    return [group for chunk in model for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


class Reduction:
    """What makes a stage's gradients whole: sums over replicas and shards, and over the stages that share an embedding.

    Each kind is started before anything waits for it. `model` are Megatron's DDP chunks.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        self._buckets = bucket_groups(model)
        for bucket in self._buckets:
            # Asynchronous whether or not Megatron was told to overlap it with the last backward.
            bucket.ddp_config = dataclasses.replace(bucket.ddp_config, overlap_grad_reduce=True)
        self._embedding: tuple[dist.Work, dist.ProcessGroup, torch.device] | None = None

    def start(self) -> None:
        """After the last backward: between replicas, unless Megatron has started it during that."""
        for bucket in self._buckets:
            if bucket.grad_reduce_handle is None:
                bucket.start_grad_sync()

    def finish_within_stage(self, finalize: Callable[[Any], object], groups: Any) -> None:
        """Wait for the replicas, and do what Megatron's `finalize_model_grads` does between ranks of one stage."""
        groups = copy.copy(groups)
        groups.embd = groups.pos_embd = _GroupOfOne()  # these join stages; None would mean Megatron's own
        with hearing(None, "replicas' gradients"):
            finalize(groups)

    def start_embedding(self, gradient: Tensor, group: dist.ProcessGroup) -> None:
        """Sum the gradient of the tied embedding with those of its other ends, in place.

        It has a bucket of its own at all ends, whose shards are alike: of a shard that is padding, there is nothing.
        """
        if gradient.numel() > 0:
            work = dist.all_reduce(gradient, group=group, async_op=True)
            self._embedding = (work, group, gradient.device) if work is not None else None

    def finish_embedding(self) -> None:
        """Wait for it, if it was started."""
        if self._embedding is not None:
            (work, group, device), self._embedding = self._embedding, None
            wait_for([work], group, "the gradient of the tied embedding", device)


class OwnGradients:
    """What the optimizer of this rank steps with: all gradients, or, of a distributed optimizer, the rank's shard.

    With `waits` they have memory of their own, allocated once, where a batch's wait for their step while the next ones
    accumulate; else they are seen where Megatron's buffers have them.
    """

    def __init__(self, model: Sequence[Any], waits: bool) -> None:
        self.waits = waits
        #: What the memory takes.
        self.nbytes = 0
        self._buckets: list[tuple[Tensor, Tensor]] = []
        self._parameters: list[tuple[Any, Tensor, Tensor]] = []
        for buffer in buffers(model):
            shards, shard = 1, 0
            if buffer.ddp_config.use_distributed_optimizer:
                shards, shard = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            present = [bucket.grad_data.view(shards, -1)[shard] for bucket in buffer.buckets]
            kept = present
            if waits:
                sizes = [part.numel() for part in present]
                kept = list(buffer.grad_data.new_empty(sum(sizes)).split(sizes))
                self.nbytes += held_gradient_bytes(buffer.grad_data.numel(), buffer.grad_data.element_size(), shards)
                self._buckets += zip(present, kept, strict=True)
            for bucket, part, own in zip(buffer.buckets, present, kept, strict=True):
                for parameter in bucket.params:
                    whole = parameter.main_grad
                    start = whole.storage_offset() - part.storage_offset()
                    view = own[max(start, 0) : max(start + whole.numel(), 0)]
                    self._parameters.append((parameter, whole, view if shards > 1 else view.view_as(whole)))

    def keep(self) -> None:
        """The gradients are reduced, and make way for the next ones."""
        for present, kept in self._buckets:
            kept.copy_(present)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, `main_grad` is what was kept: of a shard, what lies in it of the parameter, in one dimension."""
        for parameter, _, own in self._parameters:
            parameter.main_grad = own
        yield
        for parameter, whole, _ in self._parameters:
            parameter.main_grad = whole


@contextmanager
def stepping_with_own(optimizer: Any) -> Iterator[None]:
    """Inside, `optimizer` takes `main_grad` for its own shard of a gradient, and not for all of it."""
    if not hasattr(optimizer, "_get_model_param_range_map"):
        yield
        return
    ranges = optimizer._get_model_param_range_map
    optimizer._get_model_param_range_map = lambda parameter: {"param": ranges(parameter)["param"].normalize()}
    yield
    del optimizer._get_model_param_range_map


class _GroupOfOne:
    """As much of a process group as Megatron asks of one with nothing to reduce."""

    def size(self) -> int:
        return 1


def tied_embedding(model: Sequence[Any]) -> Tensor | None:
    """The weight that the first stage shares with others, on each of them; None elsewhere, and for untied models.

    There it is the output layer's, or the embedding of multi-token prediction.
    """
    shared = (weight for weight in model[0].parameters() if getattr(weight, "shared_embedding", False))
    return next((weight for weight in shared if weight.requires_grad), None)


def local_figures(optimizers: Sequence[Any], scale: Tensor | None, zeros: bool) -> Tensor:
    """This process' part of the gradient's figures, as three doubles on its device.

    They are the sum of squares, in units of a loss that is not scaled; 1 if a value is not finite (only looked for with
    a `scale`); and, if asked for, the number of zeros. What other processes count too is left out, as in Megatron.
    """
    gradients = [gradient for one in optimizers for gradient in _counted(one)]
    device = torch.device(torch.cuda.current_device())
    figures = torch.zeros(3, dtype=torch.float64, device=device)
    if not gradients:
        return figures
    norm, _ = clip_grads.multi_tensor_applier(
        clip_grads.l2_norm_impl, torch.zeros(1, dtype=torch.int, device=device), [gradients], False
    )
    figures[0] = norm.double().square().squeeze()
    if scale is not None:
        largest = torch.stack(torch._foreach_norm(gradients, ord=float("inf")))
        figures[0] /= scale.double().square().squeeze()
        figures[1] = (~torch.isfinite(largest).all()).double()
    if zeros:
        figures[2] = torch.stack([gradient.numel() - torch.count_nonzero(gradient) for gradient in gradients]).sum()
    return figures


def _counted(optimizer: Any) -> Iterator[Tensor]:
    """The gradients that `optimizer` steps with and counts, as fp32; `main_grad` has its own."""
    groups = [getattr(optimizer, name) for name in ("tp_group", "expert_tp_group") if hasattr(optimizer, name)]
    for parameter in _model_parameters(optimizer):
        gradient: Tensor | None = getattr(parameter, "main_grad", None)
        if gradient is None or not param_is_not_shared(parameter):
            continue
        if not param_is_not_tensor_parallel_duplicate(parameter, *groups):
            continue
        yield gradient.float()


def _model_parameters(optimizer: Any) -> Iterator[Any]:
    """The model's own parameters that `optimizer` steps, in whichever groups it keeps them."""
    kept = [
        groups
        for name in ("float16_groups", "fp32_from_fp32_groups", "model_float16_groups", "model_fp32_groups")
        if (groups := getattr(optimizer, name, None)) is not None
    ]
    for groups in kept or [[optimizer.get_parameters()]]:
        for group in groups:
            yield from group
