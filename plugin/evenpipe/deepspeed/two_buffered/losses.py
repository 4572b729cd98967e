"""The loss of a batch, sent by the last stage to all others without waiting for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.runtime.channel import Transfer, open_channels

__all__ = ["Losses"]


class Losses:
    """`ranks` has the global rank of each stage; all of them make one alike.

    A stage's last backward of a batch follows the last stage's: so there the loss is under way by then.
    """

    def __init__(self, ranks: Sequence[int], backend: str, device: torch.device) -> None:
        links = [("loss", ranks[-1], rank) for rank in ranks[:-1]]
        self._channels = list(open_channels(links, backend, device).values())
        self._device = device
        self._sent: list[Transfer] = []

    def send(self, losses: Tensor) -> None:
        """At the last stage."""
        self.settle()
        self._sent = [channel.send([losses]) for channel in self._channels]

    def receive(self, count: int) -> Tensor:
        """At the others: so many losses."""
        losses = torch.zeros(count, dtype=torch.float32, device=self._device)
        self._channels[0].receive([losses]).wait()
        return losses

    def close(self) -> None:
        """Close the links, once all is settled."""
        for channel in self._channels:
            channel.close()
        self._channels = []

    def settle(self) -> None:
        """Wait until all others have the losses."""
        for transfer in self._sent:
            transfer.wait()
        self._sent = []
