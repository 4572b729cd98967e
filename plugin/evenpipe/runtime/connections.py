"""The links of one pipeline, opened between its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from evenpipe.runtime.channel import Channel, open_channels
from evenpipe.runtime.ending import rest_at_exit
from evenpipe.schedule import Link, partner

__all__ = ["Connections", "connect", "pipeline_links"]


@dataclass(frozen=True)
class Connections:
    """This rank's ends: `channels` by the link between stages; `layouts` joins it with its partner, if they trade."""

    channels: Mapping[Link, Channel]
    layouts: Channel | None

    def close(self) -> None:
        """Destroy every group, once nothing is under way."""
        for channel in (*self.channels.values(), *([self.layouts] if self.layouts else [])):
            channel.close()


def pipeline_links(stages: int, wraps: bool, bpipe: bool) -> list[Link]:
    """All links that schedules of so many stages use, in the one order in which they are opened.

    `wraps`: model chunks go round, so that the last stage sends to the first. `bpipe`: pairs trade activations.
    """
    links: list[Link] = []
    for stage in range(stages if wraps else stages - 1):
        following = (stage + 1) % stages
        links += [Link("forward", stage, following), Link("backward", following, stage)]
    for evictor in range(stages // 2 if bpipe else 0):
        acceptor = partner(evictor, stages)
        links += [Link("evict", evictor, acceptor), Link("load", acceptor, evictor)]
    return links


def connect(ranks: Sequence[int], wraps: bool, bpipe: bool, backend: str, device: torch.device) -> Connections:
    """Open the links of the pipeline whose stage s runs on global rank `ranks[s]`; all its ranks must call it alike.

    Large messages hold up small ones behind them, so every link has a group of its own. What an evicted micro-batch
    consists of is told over gloo on the host, beside the activations.
    """
    rest_at_exit()
    stages = len(ranks)
    links = pipeline_links(stages, wraps, bpipe)
    opened = open_channels([(link.kind, ranks[link.source], ranks[link.target]) for link in links], backend, device)
    told = open_channels([("layout", a, b) for a, b in _pairs(ranks, bpipe)], "gloo", "cpu")
    channels = {
        link: opened[key] for link in links if (key := (link.kind, ranks[link.source], ranks[link.target])) in opened
    }
    return Connections(channels, next(iter(told.values()), None))


def _pairs(ranks: Sequence[int], bpipe: bool) -> Iterator[tuple[int, int]]:
    for evictor in range(len(ranks) // 2 if bpipe else 0):
        yield ranks[evictor], ranks[partner(evictor, len(ranks))]
