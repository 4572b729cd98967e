"""Random data of the kind that a model's example inputs are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["random_batch"]


def random_batch(inputs: Mapping[str, Tensor], micro_batches: int, *key: int) -> dict[str, Tensor]:
    """A batch of so many micro-batches like `inputs`, always the same for one key.

    Every number is drawn from those that the input of that name has, so that token ids stay in the vocabulary and a
    mask of ones is one. What has no dimension is as it is.
    """
    random = torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))

    def drawn(like: Tensor) -> Tensor:
        if not like.dim():
            return like
        shape = (micro_batches * like.shape[0], *like.shape[1:])
        return like.flatten()[torch.randint(like.numel(), shape, generator=random)]

    return {name: drawn(inputs[name]) for name in sorted(inputs)}
