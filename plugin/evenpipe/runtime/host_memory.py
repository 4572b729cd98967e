"""Memory of the host that swaps go to, pinned and lent block by block, and the copies there and back."""

from __future__ import annotations

import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.runtime import streams
from evenpipe.runtime.memory import Slot, aligned_bytes
from evenpipe.runtime.processes import free_bytes

__all__ = ["Block", "HostLink", "HostMemory", "Passage", "check_hosts"]

_GIB: Final = 2**30
#: Of copies that show how fast the link is; the first two pin memory, and the fastest counts.
_PROBE_BYTES: Final = 2**24
_PROBES: Final = 3


class Block:
    """A part of `HostMemory`, lent until this object dies. `through`: the event of the last copy to it or from it."""

    __slots__ = ("_home", "memory", "through")

    def __init__(self, home: deque[tuple[Tensor, Any]]) -> None:
        self.memory, self.through = home.popleft()
        self._home = home

    def __del__(self) -> None:
        self._home.append((self.memory, self.through))


class HostMemory:
    """Pinned memory of the host of `device`, `nbytes` in all, in blocks of the sizes that were reserved.

    Who is lent a block has to have its first copy wait for the block's last one, whoever that was of.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device
        self._free: defaultdict[int, deque[tuple[Tensor, Any]]] = defaultdict(deque)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Own a block more of each of these sizes in bytes, all in one piece."""
        if not (nbytes := aligned_bytes(sizes)):
            return
        piece = Slot(streams.pinned(self._device, nbytes))
        self.nbytes += nbytes
        for size, memory in zip(sizes, piece.parts(sizes), strict=True):
            self._free[size].append((memory, None))

    def held_line(self, stage: int) -> str:
        """Say how much it is, of a stage."""
        return f"stage {stage} keeps {self.nbytes / 2**20:.1f} MiB of its host's memory, pinned, for what it swaps"

    def give_back(self) -> None:
        """Own no block any more, once all copies are done; none is lent."""
        streams.synchronize(self._device)
        self._free.clear()
        self.nbytes = 0

    def lend(self, nbytes: int) -> Block:
        """Return the block of `nbytes` that has been free for longest; a new one, which takes time, if all are lent.

        A new one is larger by up to an eighth, so that sizes that vary a little share blocks. Raises ValueError if the
        host has not so much free.
        """
        size = nbytes if self._free.get(nbytes) else _rounded(nbytes)
        if not self._free[size]:
            free = free_bytes()
            if free is not None and size > free:
                raise ValueError(
                    f"swaps: {size / _GIB:,.2f} GiB more are to go to the memory of the host {socket.gethostname()}, "
                    f"which has {free / _GIB:,.2f} GiB free: swap a smaller share, or have fewer processes on a host"
                )
            self.reserve([size])
        return Block(self._free[size])


def _rounded(nbytes: int) -> int:
    """Return the next of eight sizes between powers of two."""
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step


def check_hosts(sizes: Iterable[int], group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on all ranks of `group` if they would reserve, on one host, more than that has free.

    `sizes`: of this rank's blocks in bytes. All ranks of the group call it before any reserves.
    """
    mine = socket.gethostname(), aligned_bytes(tuple(sizes)), free_bytes()
    needs: list[tuple[str, int, int | None]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(needs, mine, group=group)
    for host in dict.fromkeys(host for host, _, _ in needs):
        needed = sum(nbytes for where, nbytes, _ in needs if where == host)
        free = min((left for where, _, left in needs if where == host and left is not None), default=needed)
        if needed > free:
            raise ValueError(
                f"swaps take {needed / _GIB:,.1f} GiB of memory of the host {host}, which has {free / _GIB:,.1f} GiB "
                "free: make a plan with --optimize recompute, or have fewer processes on a host"
            )


class Passage:
    """A copy under way; `target` is what it is copied into: of one to the host, what `HostLink.back` takes."""

    __slots__ = ("_wait", "target")

    def __init__(self, target: Any, wait: Callable[[], None]) -> None:
        self.target = target
        self._wait = wait

    def wait(self) -> None:
        """Have what comes next find it complete: the host waits, or on CUDA the current stream."""
        self._wait()


class HostLink:
    """Copies of contiguous uint8 tensors. Each direction is first in, first out, and runs beside compute.

    A stream for each direction, so that they also run beside one another. `memory`: of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._out, self._back = streams.opened(device), streams.opened(device)
        self._device = device
        self.memory = HostMemory(device)

    @property
    def named(self) -> dict[str, streams.Stream]:
        """Return the streams of copies out and back, by name."""
        return {"swaps to the host": self._out, "swaps from the host": self._back}

    def ms_a_byte(self) -> float:
        """Return what a copy takes: the slower of the two ways, alone; between batches. It takes some milliseconds."""
        there = torch.ones(_PROBE_BYTES, dtype=torch.uint8, device=self._device)
        out_ms, back_ms = list[float](), list[float]()
        for _ in range(_PROBES):
            streams.synchronize(self._device)
            began = time.perf_counter()
            (out := self.out(there)).wait()
            streams.synchronize(self._device)
            left = time.perf_counter()
            self.back(out.target, there).wait()
            streams.synchronize(self._device)
            out_ms.append(1e3 * (left - began))
            back_ms.append(1e3 * (time.perf_counter() - left))
        return max(min(out_ms), min(back_ms)) / _PROBE_BYTES

    def out(self, memory: Tensor) -> Passage:
        """Start to copy `memory`, as it is when all that has been given to the device so far is done, to the host.

        `memory` has to be kept until the copy has been waited for.
        """
        block = self.memory.lend(memory.numel())
        if block.through is not None:  # a copy back may still read it
            self._out.wait_event(block.through)
        return Passage(block, self._start(self._out, memory, block.memory[: memory.numel()], block))

    def back(self, host: Block, memory: Tensor) -> Passage:
        """Start to copy what `out` has brought to the `host` into `memory`, which has to be kept as there."""
        self._back.wait_event(host.through)
        return Passage(memory, self._start(self._back, host.memory[: memory.numel()], memory, host))

    def _start(self, stream: streams.Stream, source: Tensor, target: Tensor, block: Block) -> Callable[[], None]:
        # What is copied has been computed by then; and memory that is copied into may have been used by others before.
        stream.wait_stream(streams.current(self._device))
        with streams.on(stream):
            target.copy_(source, non_blocking=True)
            event = stream.record_event()
        block.through = event
        return lambda: streams.current(self._device).wait_event(event)
