"""Links that are made slow, for tests that measure them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from evenpipe.runtime.channel import Channel, Transfer
from evenpipe.runtime.connections import Connections
from evenpipe.schedule import Link

__all__ = ["slowed"]


class _Slow(Channel):
    """Takes its time for every byte."""

    def __init__(self, channel: Channel, gbps: float) -> None:
        super().__init__(channel.source, channel.target, channel._group, channel.device)
        self._gbps = gbps

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        time.sleep(sum(tensor.nbytes for tensor in tensors) / (self._gbps * 1e9))
        return super().send(tensors)


def slowed(connections: Connections, link: Link, gbps: float) -> Connections:
    """`connections` at the source of `link`, which sends at `gbps` at most."""
    channels = {**connections.channels, link: _Slow(connections.channels[link], gbps)}
    return replace(connections, channels=channels)
