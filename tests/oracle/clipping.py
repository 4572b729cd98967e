"""Clipping by the global norm, with the arithmetic of Megatron on CPU within a stage."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["clip", "global_norm"]


def global_norm(stages: Sequence[Sequence[Tensor]], added_in: torch.dtype = torch.float64) -> float:
    """The norm over all stages' gradients: fp32 within a stage, as Megatron takes it.

    The stages' squares are added one by one in `added_in`.
    """
    norms = [torch.norm(torch.stack([torch.norm(gradient) for gradient in stage])) for stage in stages]
    total = torch.zeros((), dtype=added_in)
    for norm in norms:
        total += norm.to(added_in).square()
    return math.sqrt(total.item())


def clip(gradients: Sequence[Tensor], norm: float, most: float) -> None:
    """Scale `gradients`, whose norm is `norm`, down to the norm `most`."""
    coefficient = most / (norm + 1.0e-6)
    if coefficient < 1.0:
        for gradient in gradients:
            gradient.mul_(coefficient)
