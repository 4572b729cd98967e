"""How fast the links of an evictor-acceptor pair are, measured on the links themselves."""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import Tensor

from evenpipe.runtime import streams
from evenpipe.runtime.channel import Channel
from evenpipe.runtime.connections import Connections

__all__ = ["sending_gbps"]

_FIRST_BYTES: Final = 1 << 18
_MOST_BYTES: Final = 1 << 30
_LONG_ENOUGH_SECONDS: Final = 0.01
_BUFFER_BYTES: Final = 1 << 24


def sending_gbps(connections: Connections, stage: int, device: torch.device) -> float | None:
    """GB/s (10^9 bytes/s) at which `stage` sends activations to its partner; None if it has none.

    Both partners call it, between batches; pairs do not wait for each other. Every message is received, and nothing is
    under way when it returns. Takes some 50 ms on links of 0.1 GB/s and more: messages grow until they take a while.
    """
    ends = {link.source == stage: (link, end) for link, end in connections.channels.items() if _trades(link.kind)}
    if not ends:
        return None
    (link, out), (_, back) = ends[True], ends[False]
    [sizes] = (channel for evict, channel in connections.layouts.items() if _trades(evict.kind))
    pair = _Pair(sizes, out, back, device)
    return pair.lead() if link.kind == "evict" else pair.follow()


def _trades(kind: str) -> bool:
    return kind in ("evict", "load")


class _Pair:
    """One end of the two links; what size comes next is sent on the host's own link, from evictor to acceptor."""

    def __init__(self, sizes: Channel, out: Channel, back: Channel, device: torch.device) -> None:
        self._sizes = sizes
        self._out = out
        self._back = back
        self._device = device
        # Ones: pages of zeros would all be the same one, in the processor's cache.
        self._buffer = torch.ones(_BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._byte = torch.ones(1, dtype=torch.uint8, device=device)

    def lead(self) -> float:
        """The evictor's part: a message out, one back, until both have taken long enough."""
        self._there_and_back(_FIRST_BYTES)  # the first message of a link is slow
        nbytes = _FIRST_BYTES
        while True:
            start = time.perf_counter()
            gbps = self._there_and_back(nbytes)
            if nbytes >= _MOST_BYTES or time.perf_counter() - start >= _LONG_ENOUGH_SECONDS:
                self._send_size(0)
                return gbps
            nbytes *= 4

    def _there_and_back(self, nbytes: int) -> float:
        self._send_size(nbytes)
        self._await_confirmation()
        gbps = self._send(nbytes)
        self._receive(nbytes)
        self._finish()
        return gbps

    def follow(self) -> float:
        """The acceptor's part."""
        gbps = 0.0
        while nbytes := self._receive_size():
            self._confirm()
            self._receive(nbytes)
            gbps = self._send(nbytes)
        return gbps

    def _send(self, nbytes: int) -> float:
        """Send `nbytes`, and return how fast they arrived."""
        self._finish()
        start = time.perf_counter()
        transfer = self._out.send(self._message(nbytes))
        self._await_confirmation()
        self._finish()
        taken = time.perf_counter() - start
        transfer.wait()
        return nbytes / taken / 1e9

    def _receive(self, nbytes: int) -> None:
        self._back.receive(self._message(nbytes)).wait()
        self._confirm()

    def _confirm(self) -> None:
        self._out.send([self._byte]).wait()

    def _await_confirmation(self) -> None:
        self._back.receive([self._byte]).wait()

    def _finish(self) -> None:
        """Have the host come after the device, whose messages it would otherwise only have enqueued."""
        streams.synchronize(self._device)

    def _send_size(self, nbytes: int) -> None:
        self._sizes.send([torch.tensor([nbytes])]).wait()

    def _receive_size(self) -> int:
        nbytes = torch.empty(1, dtype=torch.int64)
        self._sizes.receive([nbytes]).wait()
        return int(nbytes)

    def _message(self, nbytes: int) -> list[Tensor]:
        """As evictions are: many tensors at once. They share memory, since nobody reads it."""
        return [self._buffer[:nbytes]] * max(1, nbytes // _BUFFER_BYTES)
