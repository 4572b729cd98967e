"""How much each micro-batch's loss counts in that of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Tokens", "mean_loss", "share_of", "weights_of"]

#: How many tokens, or whatever else it is a mean over, each micro-batch's loss has.
Tokens = Tensor | Sequence[float]


def weights_of(tokens: Tokens | None, total: float | None, count: int) -> list[float | None]:
    """Return the weight of each of `count` micro-batches: its share of `total`, which is all `tokens` if left out.

    None for each without `tokens`: all count the same. Raises ValueError.
    """
    if tokens is None:
        if total is not None:
            raise ValueError("total: says of how many tokens: give tokens, how many each micro-batch has")
        return [None] * count
    values = [float(one) for one in tokens]
    if len(values) != count:
        raise ValueError(f"tokens: {len(values)} numbers for {count} micro-batches: give one for each")
    whole = sum(values) if total is None else float(total)
    if min(values) < 0 or not whole > 0:
        raise ValueError(f"tokens: {values} of {whole}: give how many tokens each micro-batch's loss is a mean over")
    return [one / whole for one in values]


def share_of(loss: Tensor, weight: float | None, count: int) -> Tensor:
    """A micro-batch's part of the batch's loss. A mean over no tokens is no number, and counts nothing."""
    if weight is None:
        return loss / count
    return loss * weight if weight else torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0.0


def mean_loss(losses: Sequence[Tensor], items: Sequence[Sequence[Any]]) -> Tensor:
    """The batch's, of its micro-batches' losses; the last of what each of them gets is its weight."""
    weights = [item[-1] for item in items]
    if None in weights:
        return torch.stack(list(losses)).mean()
    return torch.stack([share_of(*one, len(items)) for one in zip(losses, weights, strict=True)]).sum()
