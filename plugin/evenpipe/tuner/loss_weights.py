"""Whether a batch's loss is the same however its samples are made micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.tuner.samples import items_of

__all__ = ["LossWeights"]

_MASK: Final = "loss_mask"


class LossWeights:
    """Which tokens of each sample count in the loss, in what this process has read.

    A loss that is a mean over a micro-batch's tokens, and then over micro-batches, does not depend on their size if all
    samples count the same tokens. Megatron's data sets say which in the mask "loss_mask" of a micro-batch, of the shape
    (samples, sequence length).
    """

    def __init__(self) -> None:
        self._sample: Tensor | None = None
        #: Whether all samples that this rank has looked at count the same tokens.
        self.even_here = True

    def watch(self, source: Iterator[Any]) -> Iterator[Any]:
        """What `source` has, looked at when it is read."""
        for micro_batch in items_of(source):
            self._look(micro_batch)
            yield micro_batch

    def even(self, device: torch.device) -> bool:
        """Whether all samples that any rank has looked at count the same tokens; all ranks of the job call it alike.

        False where no rank has looked at any. `device` is what the ranks exchange tensors on.
        """
        found = torch.tensor([not self.even_here, self._sample is not None], dtype=torch.float32, device=device)
        dist.all_reduce(found)
        uneven, looked = found.tolist()
        return not uneven and bool(looked)

    def _look(self, micro_batch: Any) -> None:
        mask = micro_batch.get(_MASK) if isinstance(micro_batch, Mapping) else None
        if not isinstance(mask, Tensor) or not len(mask):
            self.even_here = False
            return
        if self._sample is None:
            self._sample = mask[0].to("cpu", copy=True)
        # What Megatron has read before, and reads again, may have been moved to a GPU.
        alike = self._sample.shape == mask.shape[1:] and bool((mask.cpu() == self._sample).all())
        self.even_here = self.even_here and alike
