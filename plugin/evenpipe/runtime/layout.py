"""What an evicted micro-batch consists of, told once by the evictor so that the acceptor can receive it in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenpipe.runtime.channel import Channel, Transfer

__all__ = ["Layouts"]


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

    def tell(self, chunk: int, sizes: Sequence[int]) -> None:
        """At the evictor, after each forward: tell a new chunk's sizes.

        Raises RuntimeError if an earlier micro-batch of the chunk saved something else.
        """
        if chunk < len(self._sizes):
            if self._sizes[chunk] != tuple(sizes):
                raise RuntimeError(
                    f"a micro-batch saved {sum(sizes)} bytes in {len(sizes)} storages where an earlier one saved "
                    f"{sum(self._sizes[chunk])} in {len(self._sizes[chunk])}: BPipe needs micro-batches of one size; "
                    "turn it off, or whatever makes them differ (variable sequence lengths, partial recomputation)"
                )
            return
        assert chunk == len(self._sizes), "chunks have their first forward in order"
        self._sizes.append(tuple(sizes))
        message = [torch.tensor([len(sizes)]), torch.tensor(sizes, dtype=torch.int64)]
        self._sending.append(self._channel.send(message))

    def sizes(self, chunk: int) -> tuple[int, ...]:
        """At the acceptor: the sizes of `chunk`, waited for where they are not known yet."""
        while chunk >= len(self._sizes):
            count = torch.empty(1, dtype=torch.int64)
            self._channel.receive([count]).wait()
            sizes = torch.empty(int(count), dtype=torch.int64)
            self._channel.receive([sizes]).wait()
            self._sizes.append(tuple(sizes.tolist()))
        return self._sizes[chunk]
