"""What a message consists of where that differs, told by the sender with it, so that it is received in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

import torch
from torch import Tensor

from evenpipe.runtime.channel import Channel, Transfer

__all__ = ["Layouts", "shapes_heard", "shapes_told"]

_UNDER_WAY: Final = 4


class Layouts:
    """Sizes in bytes of the tensors as which an evicted micro-batch travels, one micro-batch after the other; or what
    the tensors are like that one stage gives the next, in whole numbers of its own.

    No two need be alike: who holds a storage for a moment, and what a router or a packed sequence made of the data,
    differs from one to the next. They travel between the hosts, and no device waits for them. The sender tells them
    when it starts to send, where the receiver starts to receive, which has one place in the order of both.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending: deque[Transfer] = deque()

    def tell(self, sizes: Sequence[int]) -> None:
        """At the sender: what it is about to send consists of."""
        # The receiver has taken those of a few messages ago, and little is kept alive for it.
        if len(self._sending) >= _UNDER_WAY:
            self._sending.popleft().wait()
        told = [torch.tensor([len(sizes)]), torch.tensor(sizes, dtype=torch.int64)]
        self._sending.append(self._channel.send(told))

    def next(self) -> tuple[int, ...]:
        """At the receiver: what the next message consists of, waited for."""
        count = torch.empty(1, dtype=torch.int64)
        self._channel.receive([count]).wait()
        sizes = torch.empty(int(count), dtype=torch.int64)
        self._channel.receive([sizes]).wait()
        return tuple(sizes.tolist())


def shapes_told(tensors: Sequence[Tensor]) -> list[int]:
    """The shapes of `tensors` as `shapes_heard` takes them."""
    return [number for tensor in tensors for number in (tensor.dim(), *tensor.shape)]


def shapes_heard(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes that `shapes_told` gave as `numbers`."""
    rest, shapes = iter(numbers), []
    for dimensions in rest:
        shapes.append(tuple(islice(rest, dimensions)))
    return shapes
