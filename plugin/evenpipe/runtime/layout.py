"""What an evicted micro-batch consists of, told by the evictor with it, so that the acceptor can receive in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import torch

from evenpipe.runtime.channel import Channel, Transfer

__all__ = ["Layouts"]

_UNDER_WAY: Final = 4


class Layouts:
    """Sizes in bytes of the storages of which an evicted micro-batch consists, one micro-batch after the other.

    No two need be alike: who holds a storage for a moment, and what a router or a packed sequence made of the data,
    differs from one to the next. They travel between the hosts, and no device waits for them. The evictor tells them
    when it starts the eviction, where the acceptor takes it in, which has one place in the order of both.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending: deque[Transfer] = deque()

    def tell(self, sizes: Sequence[int]) -> None:
        """At the evictor: what it is about to send consists of."""
        # The acceptor has taken those of a few evictions ago, and little is kept alive for it.
        if len(self._sending) >= _UNDER_WAY:
            self._sending.popleft().wait()
        told = [torch.tensor([len(sizes)]), torch.tensor(sizes, dtype=torch.int64)]
        self._sending.append(self._channel.send(told))

    def next(self) -> tuple[int, ...]:
        """At the acceptor: what the next eviction consists of, waited for."""
        count = torch.empty(1, dtype=torch.int64)
        self._channel.receive([count]).wait()
        sizes = torch.empty(int(count), dtype=torch.int64)
        self._channel.receive([sizes]).wait()
        return tuple(sizes.tolist())
