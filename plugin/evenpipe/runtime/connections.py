"""The links of one pipeline, opened between its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from evenpipe.runtime import streams
from evenpipe.runtime.channel import Channel, open_channels
from evenpipe.runtime.communicators import communicator_bytes, links_line, most_links
from evenpipe.runtime.device_queues import groups_over, queues_line, queues_of
from evenpipe.runtime.ending import rest_at_exit
from evenpipe.runtime.heartbeat import Heartbeat
from evenpipe.runtime.timeout import job_timeout
from evenpipe.schedule import Link, Queues

__all__ = ["Connections", "connect", "watched"]


@dataclass(frozen=True)
class Connections:
    """This rank's ends: `channels` by the link between stages; `layouts`, between hosts, beside those whose messages
    vary: of evictions, and of forward links if shapes do.

    `queues`: of the pipeline's devices, which its order goes by. `heartbeat` names a rank that is silent.
    `line` says what the pipeline's links are, and take. `named`: this rank's streams, which `compare` adds to.
    """

    channels: Mapping[Link, Channel]
    layouts: Mapping[Link, Channel]
    queues: Queues = "many"
    heartbeat: Heartbeat | None = None
    line: str = ""
    named: dict[str, streams.Stream] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """What the communicators of this rank take of its device, outside of torch's memory."""
        on_device = sum(channel.device.type == "cuda" for channel in self.channels.values())
        return on_device * communicator_bytes(os.environ)

    def compare(self, more: Mapping[str, streams.Stream]) -> None:
        """Compare `more` streams of this rank, by name, with those before; say which are one to the device."""
        before = streams.sharing(self.named)
        self.named.update(more)
        if (said := streams.sharing(self.named)) != before:
            print(f"evenpipe: rank {dist.get_rank()}: {said}", file=sys.stderr, flush=True)

    def give_up(self) -> None:
        """A batch has failed: nobody waits for what is under way any more."""
        for channel in (*self.channels.values(), *self.layouts.values()):
            channel.give_up()
        if self.heartbeat is not None:
            self.heartbeat.give_up()

    def close(self) -> None:
        """Destroy every group, once nothing is under way."""
        for channel in (*self.channels.values(), *self.layouts.values()):
            channel.close()
        if self.heartbeat is not None:
            self.heartbeat.stop()


def connect(
    ranks: Sequence[int],
    links: Sequence[Link],
    backend: str,
    device: torch.device,
    shapes_vary: bool = False,
    held_up: Queues = "many",
) -> Connections:
    """Open `links` of the pipeline whose stage s runs on global rank `ranks[s]`; all its ranks must call it alike.

    Large messages hold up small ones behind them, so every link has a group of its own. What an evicted micro-batch
    consists of is told over gloo on the host, beside the activations; so are shapes between stages that vary.
    `held_up`: what holds up this device whatever its environment says.
    """
    rest_at_exit()
    timeout = job_timeout()
    kinds = {"evict", "forward"} if shapes_vary else {"evict"}
    varying = [link for link in links if link.kind in kinds]
    heartbeat = Heartbeat(ranks, timeout)

    def opened(those: Sequence[Link], what: str, backend: str, device: torch.device) -> dict[Link, Channel]:
        named = {link: (f"{link.kind}{what}", ranks[link.source], ranks[link.target]) for link in those}
        found = open_channels(list(named.values()), backend, device, timeout, heartbeat)
        return {link: found[name] for link, name in named.items() if name in found}

    channels = opened(links, "", backend, device)
    rank = dist.get_rank()
    if rank == 0 and device.type == "cuda":
        waiting = int(any(link.kind == "load" for link in links))
        counts = {"compute": 1, "links": most_links(links), "loads that wait": waiting, "groups": groups_over(backend)}
        if said := queues_line(counts, os.environ):
            print(f"evenpipe: {said}", file=sys.stderr, flush=True)
    layouts = opened(varying, " layout", "gloo", torch.device("cpu"))
    queues = queues_of(ranks, device, held_up, heartbeat)
    heartbeat.watch(watched(device.type, channels.values()))
    heartbeat.start()
    connections = Connections(channels, layouts, queues, heartbeat, links_line(links, varying, device.type))
    connections.compare(streams_of(channels, rank, device))
    return connections


def streams_of(channels: Mapping[Link, Channel], rank: int, device: torch.device) -> dict[str, streams.Stream]:
    """Return, by name, the compute stream and those on which what a partner sends waits for what has to leave first."""
    waiting = {
        f"what waits before {link}": channel.side
        for link, channel in channels.items()
        if link.kind in ("evict", "load") and channel.target == rank
    }
    return {"compute": streams.current(device), **waiting}


def watched(device: str, channels: Iterable[Channel]) -> set[int]:
    """The ranks at the ends of `channels` whose silence no wait of this host's names.

    On CUDA it waits for nobody but for layouts: the rest is for NCCL's watchdog, which names a link.
    """
    return {rank for channel in channels for rank in (channel.source, channel.target)} if device == "cuda" else set()
