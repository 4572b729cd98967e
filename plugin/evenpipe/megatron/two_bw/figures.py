"""Figures of a batch's gradients under 2BW: norm, overflow and zeros of this process' part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

__all__ = ["local_figures"]


def local_figures(optimizers: Sequence[Any], scale: Tensor | None, zeros: bool) -> Tensor:
    """Return this process' part of the gradient's figures, as four doubles on its device.

    They are the sum of squares, in units of a loss that is not scaled; 1 if a value is not finite (only looked for with
    a `scale`); if asked for, the number of zeros; and room for one more. What other processes count too is left out, as
    in Megatron.
    """
    gradients = [gradient for optimizer in optimizers for gradient in _counted(optimizer)]
    device = torch.device(torch.cuda.current_device())
    figures = torch.zeros(4, dtype=torch.float64, device=device)
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
    """Yield the gradients that `optimizer` steps with and counts, as fp32; `main_grad` has its own."""
    groups = [getattr(optimizer, name) for name in ("tp_group", "expert_tp_group") if hasattr(optimizer, name)]
    for parameter in _model_parameters(optimizer):
        gradient: Tensor | None = getattr(parameter, "main_grad", None)
        if gradient is None or not param_is_not_shared(parameter):
            continue
        if not param_is_not_tensor_parallel_duplicate(parameter, *groups):
            continue
        yield gradient.float()


def _model_parameters(optimizer: Any) -> Iterator[Any]:
    """Yield the model's own parameters that `optimizer` steps, in whichever groups it keeps them."""
    kept = [
        groups
        for name in ("float16_groups", "fp32_from_fp32_groups", "model_float16_groups", "model_fp32_groups")
        if (groups := getattr(optimizer, name, None)) is not None
    ]
    for groups in kept or [[optimizer.get_parameters()]]:
        for group in groups:
            yield from group
