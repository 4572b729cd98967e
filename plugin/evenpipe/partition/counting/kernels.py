"""The operations that a device runs where they differ in what they save from those of the CPU that counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx

__all__ = ["Call", "kernels_of"]

_aten = torch.ops.aten

Call = Callable[..., Any]


def kernels_of(device_type: str) -> Callable[[fx.Node], Call]:
    """What to call for a node, as a device of this type ("cpu" or "cuda") would.

    A CPU's dropout saves its mask in the type of what it drops, and CUDA's one byte an element; with dropout, a CPU's
    attention takes the path that keeps all scores, and CUDA's does not.
    """
    replaced = _CUDA if device_type == "cuda" else {}
    return lambda node: replaced.get(node.target, node.target)  # type: ignore[arg-type]


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    if not train or not 0 < p < 1:
        return _aten.dropout.default(tensor, p, train)  # type: ignore[no-any-return]
    return _aten.native_dropout.default(tensor, p, train)[0]  # type: ignore[no-any-return]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The memory-efficient kernel, which any mask and precision goes through (flash attention saves the same)."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    output = _aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, query.requires_grad or key.requires_grad, dropout_p, is_causal, scale=scale
    )
    return output[0]  # type: ignore[no-any-return]


_CUDA: Final[dict[Any, Call]] = {
    _aten.dropout.default: _dropout,
    _aten.scaled_dot_product_attention.default: _attention,
}
