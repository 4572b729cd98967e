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
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

__all__ = ["HeldGradients", "Reduction", "local_figures", "tied_embedding"]


class Reduction:
    """What makes a stage's gradients whole: sums over replicas and shards, and over the two ends of a tied embedding.

    Each kind is started before anything waits for it. `model` are Megatron's DDP chunks.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        self._buckets = [bucket for chunk in model for bucket in chunk.bucket_groups]
        for bucket in self._buckets:
            # Asynchronous whether or not Megatron was told to overlap it with the last backward.
            bucket.ddp_config = dataclasses.replace(bucket.ddp_config, overlap_grad_reduce=True)
        self._embedding: dist.Work | None = None

    def start(self) -> None:
        """After the last backward: between replicas, unless Megatron has started it during that."""
        for bucket in self._buckets:
            if bucket.grad_reduce_handle is None:
                bucket.start_grad_sync()

    def finish_within_stage(self, finalize: Callable[[Any], object], groups: Any) -> None:
        """Wait for the replicas, and do what Megatron's `finalize_model_grads` does between ranks of one stage."""
        groups = copy.copy(groups)
        groups.embd = groups.pos_embd = _GroupOfOne()  # these join stages; None would mean Megatron's own
        finalize(groups)

    def start_embedding(self, gradient: Tensor, group: dist.ProcessGroup) -> None:
        """Sum the gradient of the tied embedding with that of its other end, in place."""
        self._embedding = dist.all_reduce(gradient, group=group, async_op=True)

    def finish_embedding(self) -> None:
        """Wait for it, if it was started."""
        if self._embedding is not None:
            self._embedding.wait()
            self._embedding = None


class HeldGradients:
    """A second gradient buffer: a batch's gradients wait here for their step while the next ones accumulate."""

    def __init__(self, model: Sequence[Any]) -> None:
        self._buffers = []
        self._parameters: list[tuple[Any, Tensor, Tensor]] = []
        held = {}
        for buffer in (buffer for chunk in model for buffer in chunk.buffers):
            copied = torch.zeros_like(buffer.grad_data)
            self._buffers.append((buffer.grad_data, copied))
            held[buffer.grad_data.untyped_storage()._cdata] = (
                copied.untyped_storage(),
                buffer.grad_data.storage_offset(),
            )
        for parameter in (p for chunk in model for p in chunk.parameters() if hasattr(p, "main_grad")):
            gradient = parameter.main_grad
            storage, offset = held[gradient.untyped_storage()._cdata]
            view = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
            view.set_(storage, gradient.storage_offset() - offset, gradient.size(), gradient.stride())
            self._parameters.append((parameter, gradient, view))

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return sum(copied.nbytes for _, copied in self._buffers)

    def keep(self) -> None:
        """Copy all gradients here."""
        for gradients, copied in self._buffers:
            copied.copy_(gradients)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, `main_grad` is what was kept."""
        for parameter, _, view in self._parameters:
            parameter.main_grad = view
        yield
        for parameter, gradient, _ in self._parameters:
            parameter.main_grad = gradient


class _GroupOfOne:
    """As much of a process group as Megatron asks of one with nothing to reduce."""

    def size(self) -> int:
        return 1


def tied_embedding(model: Sequence[Any]) -> Tensor | None:
    """The weight that the first and the last stage share, on one of these; None elsewhere, and for untied models."""
    module = get_attr_wrapped_model(model[0], "pre_process", return_model_obj=True)
    if not (module.share_embeddings_and_output_weights and (module.pre_process or module.post_process)):
        return None
    weight: Tensor = module.shared_embedding_or_output_weight()
    return weight if weight.requires_grad else None


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
    """The gradients that `optimizer` steps with and counts, as fp32, whole or (distributed optimizer) its shards."""
    group = getattr(optimizer, "tp_group", None)
    for parameter in _model_parameters(optimizer):
        gradient: Tensor | None = getattr(parameter, "main_grad", None)
        if gradient is None or not param_is_not_shared(parameter):
            continue
        if not param_is_not_tensor_parallel_duplicate(parameter, *([group] if group is not None else [])):
            continue
        if hasattr(optimizer, "_get_model_param_range_map"):
            shard = optimizer._get_model_param_range_map(parameter)["param"]
            gradient = gradient.view(-1)[shard.start : shard.end]
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
