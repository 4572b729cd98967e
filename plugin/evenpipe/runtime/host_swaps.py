"""Swaps of what autograd saved, from any module, to the memory of the stage's host: a share, or down to a limit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from evenpipe.runtime.host_memory import Block, HostLink, Passage
from evenpipe.runtime.movable import largest_within, least_that_frees
from evenpipe.runtime.saved import SavedStorage
from evenpipe.runtime.store import ActivationStore
from evenpipe.runtime.timing import Stopwatch
from evenpipe.schedule import Action, Unit, most_whole
from evenpipe.schedule.swap_room import Saved, SwapRoom

__all__ = ["HostLimit", "HostSwaps"]


class HostLimit:
    """The bytes that a stage may hold of its micro-batches, and what these save, for `HostSwaps` to keep to it.

    `limit_bytes`: None until it is known; everything that can leave does then. `saved`: by model chunk; it grows with
    larger micro-batches, and with it the share that leaves.
    """

    def __init__(self) -> None:
        self.is_exceeded = False
        self.forget()

    def forget(self) -> None:
        """Between batches: nothing is known of what micro-batches save."""
        self.limit_bytes: float | None = None
        self.saved: dict[int, Saved] = {}
        self.share = 1.0
        self._room: SwapRoom | None = None

    def begin(self, row: Sequence[Action]) -> None:
        """Begin a batch with these actions of the stage."""
        self._room = SwapRoom(row)
        if self.saved:
            self._weigh()

    def leaving(self, unit: Unit, nbytes: int, free_to_move: int | None) -> float:
        """Return how many bytes are to leave of a micro-batch that has saved so many, of which so many can.

        None: nobody has looked how many, as of a stage that swaps nothing. As many stay then as is known to stay of
        others; all, if that is not known.
        """
        known = self.saved.get(unit.chunk, Saved())
        unseen = known.staying if known.nbytes else nbytes
        staying = unseen if free_to_move is None else nbytes - free_to_move
        saved = self.saved[unit.chunk] = known.with_unit(unit.micro_batch, nbytes, staying)
        if saved != known:
            self._weigh()
        return self.share * min(nbytes, saved.nbytes or nbytes)

    def _weigh(self) -> None:
        if self.limit_bytes is None or self._room is None:
            return
        share = self._room.least_share(self.saved, self.limit_bytes)
        self.share, self.is_exceeded = (1.0, True) if share is None else (share, self.is_exceeded)


class HostSwaps:
    """Moves storages of each micro-batch to the host after its forward, and back before its backward.

    `share`: the largest part of a micro-batch's saved bytes that goes there, or, under a `HostLimit`, the least part.
    """

    def __init__(
        self, store: ActivationStore, device: torch.device, share: float | HostLimit, link: HostLink | None = None
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

    @property
    def limit(self) -> HostLimit | None:
        """Return the limit that is kept to."""
        return self.share if isinstance(self.share, HostLimit) else None

    def begin(self, row: Sequence[Action], exposed: Stopwatch | None) -> None:
        """Begin a batch with these actions of the stage; `exposed` counts waits for copies."""
        self._most_whole, self._exposed, self._reached = most_whole(row), exposed, 1.0
        if self.limit is not None:
            self.limit.begin(row)

    def seal(self, unit: Unit) -> None:
        """Choose what of this micro-batch, which has just been forwarded, is to go to the host."""
        self._store.seal(unit, unit.chunk, lambda sealed: self._chosen(unit, sealed))

    def _chosen(self, unit: Unit, sealed: Sequence[SavedStorage]) -> set[SavedStorage]:
        nbytes = self._store.nbytes(unit)
        if isinstance(self.share, HostLimit):
            free_to_move = sum(saved.nbytes for saved in sealed)
            return least_that_frees(sealed, self.share.leaving(unit, nbytes, free_to_move))
        return largest_within(sealed, self.share * nbytes)

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
        held = f"{self.link.memory.held_line(stage)}: {self._reached:.0%} of each micro-batch"
        return held if self.limit is not None else f"{held}, of {self.share:.0%} asked"

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
