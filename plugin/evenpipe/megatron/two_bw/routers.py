"""The state of experts' routers under 2BW: each batch's counts of tokens, and the biases that they move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["Routers"]

_BIASES: Final = ("expert_bias", "qb_beta")
_COUNTS: Final = (
    *("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"),
    *("qb_beta_accum", "qb_beta_count"),
)


class Routers:
    """The routers of one stage that balance whole batches: by an experts' bias, or by the global auxiliary loss.

    Megatron counts tokens in buffers, and empties them where it finishes a batch's gradients. Under 2BW the next batch
    has begun by then, so each batch has counts of its own. A bias belongs to a weight version: batch t is routed by
    that of W(t-1), and its counts move that of W(t), which makes that of W(t+1). A skipped step moves it too, as in
    Megatron.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        self._modules = [module for chunk in model for module in chunk.modules() if hasattr(module, "expert_bias")]
        for module in self._modules:
            module._maintain_float32_expert_bias()  # else the first forward gives a bias of bf16 other memory
        #: Buffers that weight versions have beside parameters.
        self.biases = self._buffers(_BIASES)
        self._counts = self._buffers(_COUNTS)
        self._counts_of: dict[int, list[Tensor]] = {}  # by batch
        self._present: int | None = None
        self._moved: list[Tensor] = []

    def use(self, batch: int) -> None:
        """Count for `batch` from now on."""
        if batch == self._present:
            return
        self._present = batch
        if batch not in self._counts_of:
            self._counts_of[batch] = [torch.zeros_like(count) for count in self._counts]
        for count, own in zip(self._counts, self._counts_of[batch], strict=True):
            count.data = own

    def gather(self, batch: int) -> None:
        """Nothing is brought to other stages."""

    def drop(self, first: int) -> None:
        """Forget `first` and later batches, whose forwards will be computed again."""
        self._counts_of = {batch: counts for batch, counts in self._counts_of.items() if batch < first}
        self._present = None

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Have Megatron finish the oldest batch inside: it sees that batch's counts, and moves copies of the biases."""
        if not self._counts_of:
            yield
            return
        oldest, present = min(self._counts_of), self._present
        self.use(oldest)
        newest = [bias.data for bias in self.biases]
        trained = [module.training for module in self._modules]
        for bias in self.biases:
            bias.data = bias.data.clone()
        for module in self._modules:
            module.train()  # the loop may be about to evaluate
        yield
        for module, before in zip(self._modules, trained, strict=True):
            module.train(before)
        self._moved = [bias.data for bias in self.biases]
        for bias, before in zip(self.biases, newest, strict=True):
            bias.data = before
        del self._counts_of[oldest]
        self._present = None
        if present in self._counts_of:
            self.use(present)

    def step(self) -> None:
        """Write the moved biases into the version that is written."""
        for bias, moved in zip(self.biases, self._moved, strict=True):
            bias.copy_(moved)

    def _buffers(self, names: Sequence[str]) -> list[Tensor]:
        every = (getattr(module, name, None) for module in self._modules for name in names)
        return [buffer for buffer in every if buffer is not None]
