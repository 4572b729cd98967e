"""What a stage holds in saved activations: the count of its bytes and micro-batches, and the acceptor's slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "MemoryCounter", "Slot", "SlotPool", "aligned_bytes"]


@dataclass
class MemoryCounter:
    """Exact running totals, fed by `ActivationStore` (own) and `SlotPool` (accepted).

    Sizes are in bytes, units in micro-batches (times model chunks). `peak_bytes` and `peak_units` are peaks of the sum
    of own and accepted, which need not have peaked at the same moment; `evicted_bytes` is the total given to the
    partner, and `swapped_bytes` to the host: all since the last `reset_peak`. `largest_saved`: what one micro-batch
    saved at most; `largest_sent`: the largest message to a neighbour.
    """

    own_bytes: int = 0
    accepted_bytes: int = 0
    own_units: int = 0
    accepted_units: int = 0
    peak_bytes: int = 0
    peak_units: int = 0
    evicted_bytes: int = 0
    swapped_bytes: int = 0
    largest_saved: int = 0
    largest_sent: int = 0

    def forget_largest(self) -> None:
        """Micro-batches that follow have other sizes than those so far."""
        self.largest_saved = self.largest_sent = 0

    def note_saved(self, nbytes: int) -> None:
        """A forward has saved so much."""
        self.largest_saved = max(self.largest_saved, nbytes)

    def note_sent(self, nbytes: int) -> None:
        """A message to a neighbour has so many bytes."""
        self.largest_sent = max(self.largest_sent, nbytes)

    def add_own(self, nbytes: int) -> None:
        """Count `nbytes` more of this stage's own saved activations (negative: fewer); see `note_peak`."""
        self.own_bytes += nbytes

    def add_accepted(self, nbytes: int) -> None:
        """Count `nbytes` more held for another stage (negative: fewer)."""
        self.accepted_bytes += nbytes
        self.note_peak()

    def note_peak(self) -> None:
        """Take what is saved now as a peak, if it is one.

        To be called when a forward or a load has saved all it saves. Whatever an operation saves and drops before that
        (as dropout does inside a recomputed region) waits for no backward; it is workspace.
        """
        self.peak_bytes = max(self.peak_bytes, self.own_bytes + self.accepted_bytes)

    def add_own_units(self, units: int) -> None:
        """Count `units` more live micro-batches of this stage (negative: fewer)."""
        self.own_units += units
        self.peak_units = max(self.peak_units, self.own_units + self.accepted_units)

    def add_accepted_units(self, units: int) -> None:
        """Count `units` more live micro-batches of another stage (negative: fewer)."""
        self.accepted_units += units
        self.peak_units = max(self.peak_units, self.own_units + self.accepted_units)

    def reset_peak(self) -> None:
        """Start a new period: peaks fall to what is live now, the totals of what left to zero."""
        self.peak_bytes = self.own_bytes + self.accepted_bytes
        self.peak_units = self.own_units + self.accepted_units
        self.evicted_bytes = self.swapped_bytes = 0


# Every data type and vectorised copy (16 bytes on a GPU, 64 on a CPU) is content with it, and little is lost by it.
ALIGNMENT = 64


def aligned_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that parts of `sizes` bytes take in a slot, each part rounded up to `ALIGNMENT`."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


class Slot:
    """Memory for one accepted micro-batch, on loan from a `SlotPool`; `nbytes` is what was asked for."""

    __slots__ = ("buffer", "nbytes")

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.nbytes = 0

    @property
    def capacity(self) -> int:
        """Bytes this slot can hold."""
        return self.buffer.numel()

    def parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return one uint8 view per size, in order, every view starting at a multiple of `ALIGNMENT` (64) bytes.

        Needs a slot of `aligned_bytes(sizes)`; the same sizes give the same memory again.
        """
        views = []
        start = 0
        for size in sizes:
            views.append(self.buffer.narrow(0, start, size))
            start += -(-size // ALIGNMENT) * ALIGNMENT
        return views


class SlotPool:
    """Slots of device memory that are reused from one accepted micro-batch to the next.

    In steady state (as many slots as are in use at once, each large enough) `acquire` and `release` call no allocator.
    """

    def __init__(self, device: torch.device | str, counter: MemoryCounter | None = None) -> None:
        self.device = torch.device(device)
        self.counter = counter if counter is not None else MemoryCounter()
        self._free: list[Slot] = []
        self._used: dict[int, Slot] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory the pool owns, in use or free."""
        return sum(slot.capacity for slot in (*self._free, *self._used.values()))

    @property
    def in_use(self) -> int:
        """Number of slots on loan."""
        return len(self._used)

    def reserve(self, count: int, nbytes: int) -> None:
        """See to it that the pool owns `count` slots that hold `nbytes` each, and no others but what is in use."""
        large = sum(slot.capacity >= nbytes for slot in (*self._free, *self._used.values()))
        small = [slot for slot in self._free if slot.capacity < nbytes]
        for _ in range(count - large):
            if small:
                self._free.remove(small.pop())
            self._free.append(self._allocate(nbytes))
        largest = sorted((*self._free, *self._used.values()), key=lambda slot: slot.capacity)[-count:]
        self._free = [slot for slot in self._free if slot in largest]

    def acquire(self, nbytes: int) -> Slot:
        """Lend a slot that holds `nbytes`: the smallest free one that does, else a new one in place of a smaller one.

        Raises ValueError for a negative size.
        """
        if nbytes < 0:
            raise ValueError(f"a slot cannot hold {nbytes} bytes")
        fitting = [slot for slot in self._free if slot.capacity >= nbytes]
        if fitting:
            slot = min(fitting, key=lambda free: free.capacity)
            self._free.remove(slot)
        else:
            if self._free:
                self._free.pop()
            slot = self._allocate(nbytes)
        slot.nbytes = nbytes
        self._used[id(slot)] = slot
        self.counter.add_accepted(nbytes)
        self.counter.add_accepted_units(1)
        return slot

    def release(self, slot: Slot) -> None:
        """Take `slot` back for reuse by work enqueued later. Raises ValueError if it is not on loan from this pool."""
        if self._used.pop(id(slot), None) is not slot:
            raise ValueError("this slot is not on loan from this pool: it was released before, or acquired elsewhere")
        self._free.append(slot)
        self.counter.add_accepted(-slot.nbytes)
        self.counter.add_accepted_units(-1)

    def _allocate(self, nbytes: int) -> Slot:
        return Slot(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
