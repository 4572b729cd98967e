"""What an evicted micro-batch consists of, told once by the evictor so that the acceptor can receive it in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from evenpipe.runtime.channel import Channel, Transfer

__all__ = ["Layouts"]

_FIRST_SECONDS: Final = 0.05
_NEXT_SECONDS: Final = 0.01
_TRIES: Final = 100


class Layouts:
    """Sizes in bytes of the storages that one micro-batch saves, per model chunk: the same for every micro-batch.

    The evictor tells a chunk's sizes after its first forward, in the order of chunks; the acceptor waits for them at
    the chunk's first accept. No deadlock: the evictor reaches that forward without anything that the acceptor does
    after the point at which it accepts.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sizes: list[tuple[int, ...]] = []
        self._sending: list[Transfer] = []

    def tell(self, chunk: int, decide: Callable[[], Sequence[int]]) -> None:
        """At the evictor, after each forward: tell a new chunk's sizes, as `decide` (ActivationStore.seal) has them.

        A collective that has been waited for holds its tensors a little longer, and what is held does not depart: so
        wait for that after the first forward of a chunk, and wherever later ones differ from it.
        Raises RuntimeError if an earlier micro-batch of the chunk saved something else.
        """
        if chunk < len(self._sizes):
            self._compare(chunk, decide)
            return
        assert chunk == len(self._sizes), "chunks have their first forward in order"
        time.sleep(_FIRST_SECONDS)
        self._sizes.append(tuple(decide()))
        sizes = self._sizes[chunk]
        message = [torch.tensor([len(sizes)]), torch.tensor(sizes, dtype=torch.int64)]
        self._sending.append(self._channel.send(message))

    def _compare(self, chunk: int, decide: Callable[[], Sequence[int]]) -> None:
        for _ in range(_TRIES):
            sizes = tuple(decide())
            if sizes == self._sizes[chunk]:
                return
            time.sleep(_NEXT_SECONDS)
        raise RuntimeError(
            f"a micro-batch saved {sum(sizes)} bytes in {len(sizes)} storages where an earlier one saved "
            f"{sum(self._sizes[chunk])} in {len(self._sizes[chunk])}: BPipe needs micro-batches of one size; "
            "turn it off, or whatever makes them differ (variable sequence lengths, partial recomputation)"
        )

    def sizes(self, chunk: int) -> tuple[int, ...]:
        """At the acceptor: the sizes of `chunk`, waited for where they are not known yet."""
        while chunk >= len(self._sizes):
            count = torch.empty(1, dtype=torch.int64)
            self._channel.receive([count]).wait()
            sizes = torch.empty(int(count), dtype=torch.int64)
            self._channel.receive([sizes]).wait()
            self._sizes.append(tuple(sizes.tolist()))
        return self._sizes[chunk]
