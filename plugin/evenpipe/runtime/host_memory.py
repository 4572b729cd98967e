"""Memory of the host that swaps go to: pinned in one piece at the start, and lent block by block."""

from __future__ import annotations

import socket
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.runtime import streams
from evenpipe.runtime.free_memory import free_bytes
from evenpipe.runtime.pool import Slot, aligned_bytes

__all__ = ["Block", "HostMemory", "check_hosts"]

_GIB: Final = 2**30


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

    def lend(self, nbytes: int) -> Block:
        """Return the block of `nbytes` that has been free for longest; a new one, which takes time, if all are lent."""
        if not self._free[nbytes]:
            self.reserve([nbytes])
        return Block(self._free[nbytes])


def check_hosts(sizes: Iterable[int], group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on all ranks of `group` if they would reserve, on one host, more than that has free.

    `sizes`: of this rank's blocks in bytes. All ranks of the group call it before any reserves.
    """
    mine = socket.gethostname(), aligned_bytes(tuple(sizes)), free_bytes()
    found: list[tuple[str, int, int | None]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    for host in dict.fromkeys(host for host, _, _ in found):
        needed = sum(nbytes for where, nbytes, _ in found if where == host)
        free = min((left for where, _, left in found if where == host and left is not None), default=needed)
        if needed > free:
            raise ValueError(
                f"swaps take {needed / _GIB:,.1f} GiB of memory of the host {host}, which has {free / _GIB:,.1f} GiB "
                "free: make a plan with --optimize recompute, or have fewer processes on a host"
            )
