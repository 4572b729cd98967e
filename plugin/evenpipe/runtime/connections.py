"""The links of one pipeline, opened between its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from evenpipe.runtime.channel import Channel, open_channels
from evenpipe.runtime.communicators import communicator_bytes, links_line
from evenpipe.runtime.ending import rest_at_exit
from evenpipe.runtime.pulse import Pulse
from evenpipe.runtime.timeout import job_timeout
from evenpipe.schedule import Link

__all__ = ["Connections", "connect"]


@dataclass(frozen=True)
class Connections:
    """This rank's ends: `channels` by the link between stages; `layouts` joins it with its partner, if they trade.
    `shapes`, between hosts, are of the forward links whose messages vary in shape.

    `one_queue`: the devices of the pipeline take all work from one queue. `pulse` names a rank that is silent.
    `line` says what the pipeline's links are, and take.
    """

    channels: Mapping[Link, Channel]
    layouts: Channel | None
    one_queue: bool = False
    pulse: Pulse | None = None
    line: str = ""
    shapes: Mapping[Link, Channel] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """What the communicators of this rank take of its device, outside of torch's memory."""
        on_device = sum(channel.device.type == "cuda" for channel in self.channels.values())
        return on_device * communicator_bytes(os.environ)

    def close(self) -> None:
        """Destroy every group, once nothing is under way."""
        layouts = [self.layouts] if self.layouts else []
        for channel in (*self.channels.values(), *layouts, *self.shapes.values()):
            channel.close()
        if self.pulse is not None:
            self.pulse.stop()


def connect(
    ranks: Sequence[int],
    links: Sequence[Link],
    backend: str,
    device: torch.device,
    one_queue: bool = False,
    shapes_vary: bool = False,
) -> Connections:
    """Open `links` of the pipeline whose stage s runs on global rank `ranks[s]`; all its ranks must call it alike.

    Large messages hold up small ones behind them, so every link has a group of its own. What an evicted micro-batch
    consists of is told over gloo on the host, beside the activations; so are shapes between stages that vary.
    """
    rest_at_exit()
    timeout = job_timeout()
    pairs = [("layout", ranks[link.source], ranks[link.target]) for link in links if link.kind == "evict"]
    # On a GPU the host waits for nobody but for layouts: NCCL's watchdog waits for the rest.
    varying = [link for link in links if link.kind == "forward"] if shapes_vary else []
    pulse = Pulse(ranks, timeout) if pairs or varying or (links and device.type == "cpu") else None
    keys = {link: (link.kind, ranks[link.source], ranks[link.target]) for link in links}
    opened = open_channels(list(keys.values()), backend, device, timeout, pulse)
    layouts = open_channels(pairs, "gloo", "cpu", timeout, pulse)
    named = {link: ("shape", ranks[link.source], ranks[link.target]) for link in varying}
    told = open_channels(list(named.values()), "gloo", "cpu", timeout, pulse)
    if pulse is not None:
        pulse.start()
    channels = {link: opened[key] for link, key in keys.items() if key in opened}
    shapes = {link: told[key] for link, key in named.items() if key in told}
    line = links_line(links, device.type)
    return Connections(channels, next(iter(layouts.values()), None), one_queue, pulse, line, shapes)
