"""What messages take on the links of a pipeline, end to end, measured on the links themselves (Ada-Grouper §5.2)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from evenpipe.runtime.connections import Connections
from evenpipe.schedule import Link

__all__ = ["Burst", "measure_links"]


class Burst(NamedTuple):
    """Messages sent back to back, as a group of micro-batches sends them."""

    messages: int
    nbytes: int


def measure_links(
    connections: Connections, stage: int, stages: int, bursts: Sequence[Burst], rounds: int, device: torch.device
) -> dict[Link, tuple[tuple[float, ...], ...]]:
    """For each link on which `stage` sends, per burst and round: milliseconds of a message until its receiver has it.

    All stages of a pipeline call it, between batches; nothing is under way when it returns. The links of one direction
    are measured at once, as a pipeline uses them.
    """
    probe = _Probe(connections, stage, stages, device)
    found: dict[Link, list[list[float]]] = {link: [[] for _ in bursts] for link in probe.outgoing}
    for _ in range(rounds):
        for number, burst in enumerate(bursts):
            for link, milliseconds in probe.send(burst).items():
                found[link][number].append(milliseconds)
    return {link: tuple(map(tuple, by_burst)) for link, by_burst in found.items()}


class _Probe:
    def __init__(self, connections: Connections, stage: int, stages: int, device: torch.device) -> None:
        self._channels = connections.channels
        self._device = device
        self._byte = torch.ones(1, dtype=torch.uint8, device=device)
        before, behind = stage > 0, stage < stages - 1
        #: Per direction: the link that comes in, the one that goes out, and those on which receivers answer.
        self._directions = (
            (
                Link("forward", stage - 1, stage) if before else None,
                Link("forward", stage, stage + 1) if behind else None,
                Link("backward", stage, stage - 1),
                Link("backward", stage + 1, stage),
            ),
            (
                Link("backward", stage + 1, stage) if behind else None,
                Link("backward", stage, stage - 1) if before else None,
                Link("forward", stage, stage + 1),
                Link("forward", stage - 1, stage),
            ),
        )
        self.outgoing = [out for _, out, _, _ in self._directions if out is not None]

    def send(self, burst: Burst) -> dict[Link, float]:
        """One burst forward, then one backward, by all stages; ms of a message on each outgoing link."""
        found = {}
        message = torch.ones(burst.nbytes, dtype=torch.uint8, device=self._device)
        for into, out, answer, answered in self._directions:
            received = []
            if into is not None:
                received = [self._channels[into].receive([torch.empty_like(message)]) for _ in range(burst.messages)]
            start = time.perf_counter()
            under_way = []
            if out is not None:
                under_way = [self._channels[out].send([message]) for _ in range(burst.messages)]
            for transfer in received:
                transfer.wait()
            self._finish()
            if into is not None:
                under_way.append(self._channels[answer].send([self._byte]))
            if out is not None:
                self._channels[answered].receive([self._byte.clone()]).wait()
                self._finish()
                found[out] = (time.perf_counter() - start) * 1e3 / burst.messages
            for transfer in under_way:
                transfer.wait()
        return found

    def _finish(self) -> None:
        """Have the host come after the device, whose messages it would otherwise only have enqueued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
