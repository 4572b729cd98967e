"""The links of one pipeline, opened between its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from evenpipe.runtime.channel import Channel, open_channels
from evenpipe.runtime.ending import rest_at_exit
from evenpipe.schedule import Link

__all__ = ["Connections", "connect"]


@dataclass(frozen=True)
class Connections:
    """This rank's ends: `channels` by the link between stages; `layouts` joins it with its partner, if they trade.

    `one_queue`: the devices of the pipeline take all work from one queue.
    """

    channels: Mapping[Link, Channel]
    layouts: Channel | None
    one_queue: bool = False

    def close(self) -> None:
        """Destroy every group, once nothing is under way."""
        for channel in (*self.channels.values(), *([self.layouts] if self.layouts else [])):
            channel.close()


def connect(
    ranks: Sequence[int], links: Sequence[Link], backend: str, device: torch.device, one_queue: bool = False
) -> Connections:
    """Open `links` of the pipeline whose stage s runs on global rank `ranks[s]`; all its ranks must call it alike.

    Large messages hold up small ones behind them, so every link has a group of its own. What an evicted micro-batch
    consists of is told over gloo on the host, beside the activations.
    """
    rest_at_exit()
    opened = open_channels([(link.kind, ranks[link.source], ranks[link.target]) for link in links], backend, device)
    pairs = [("layout", ranks[link.source], ranks[link.target]) for link in links if link.kind == "evict"]
    layouts = open_channels(pairs, "gloo", "cpu")
    channels = {
        link: opened[key] for link in links if (key := (link.kind, ranks[link.source], ranks[link.target])) in opened
    }
    return Connections(channels, next(iter(layouts.values()), None), one_queue)
