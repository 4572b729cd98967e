"""Swaps of a share of what autograd saved, from any module, to the memory of the stage's host."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from evenpipe.runtime.host_memory import Block, HostLink, Passage
from evenpipe.runtime.store import ActivationStore
from evenpipe.runtime.timing import Stopwatch

__all__ = ["HostSwaps"]


class HostSwaps:
    """Moves storages of each micro-batch to the host after its forward, and back before its backward.

    `share`: the largest part of a micro-batch's saved bytes that goes there; `ActivationStore.seal` chooses storages.
    """

    def __init__(
        self, store: ActivationStore, device: torch.device, share: float, link: HostLink | None = None
    ) -> None:
        self.share = share
        self.link = link if link is not None else HostLink(device)
        self._most_whole = 1
        self._exposed: Stopwatch | None = None
        self._reached = 1.0
        self._store = store
        self._leaving: dict[Hashable, list[Passage]] = {}  # oldest first
        self._on_host: dict[Hashable, list[Block]] = {}
        self._arriving: dict[Hashable, list[Passage]] = {}

    def begin(self, most_whole: int, exposed: Stopwatch | None) -> None:
        """Begin a batch with at most `most_whole` whole micro-batches here; `exposed` counts waits for copies."""
        self._most_whole, self._exposed = most_whole, exposed

    def make_room(self) -> None:
        """Wait for copies to the host until there is room for one micro-batch more; let go of what has been copied."""
        whole = len(self._store.leftover()) - len(self._on_host)
        for unit in list(self._leaving)[: max(0, whole + 1 - self._most_whole)]:
            self._gone(unit)

    def swap_out(self, unit: Hashable) -> None:
        """Start to copy the chosen storages of this micro-batch to the host."""
        message = self._store.ship(unit, "host")
        nbytes = sum(tensor.numel() for tensor in message)
        self._reached = min(self._reached, nbytes / max(1, nbytes + self._store.nbytes(unit)))
        self._leaving[unit] = [self.link.out(tensor) for tensor in message]

    def swap_in(self, unit: Hashable) -> None:
        """Start to copy the micro-batch back."""
        if unit in self._leaving:
            self._gone(unit)
        if unit in self._on_host:
            self.make_room()
            blocks = self._on_host.pop(unit)
            memory = self._store.refill(unit, origin="host")
            self._arriving[unit] = [self.link.back(*both) for both in zip(blocks, memory, strict=True)]

    def ready(self, unit: Hashable) -> None:
        """Wait until the micro-batch is back, and put its tensors where autograd finds them."""
        for passage in self._arriving.pop(unit, ()):
            self._wait(passage)
        self._store.unpack(unit, "host")

    def line(self, stage: int) -> str:
        """Return a line for the log: a stage's memory on its host, and the share of saved bytes that goes there."""
        return (
            f"{self.link.memory.held_line(stage)}: {self._reached:.0%} of each micro-batch, of {self.share:.0%} asked"
        )

    def forget(self) -> None:
        """Wait for copies under way, and forget all micro-batches: no backward of theirs follows."""
        for passages in (*self._leaving.values(), *self._arriving.values()):
            for passage in passages:
                passage.wait()
        for units in (self._leaving, self._on_host, self._arriving):
            units.clear()

    def _wait(self, passage: Passage) -> None:
        if self._exposed is None:
            passage.wait()
        else:
            self._exposed.wait(passage)

    def _gone(self, unit: Hashable) -> None:
        passages = self._leaving.pop(unit)
        for passage in passages:
            self._wait(passage)
        self._store.release(unit, "host")
        self._on_host[unit] = [passage.target for passage in passages]
