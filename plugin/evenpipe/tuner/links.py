"""What messages take on the links of a pipeline, end to end, measured on the links themselves (Ada-Grouper §5.2)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice, pairwise
from statistics import median
from typing import Final, NamedTuple

import torch

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.connections import Connections
from evenpipe.schedule import Link

__all__ = ["Burst", "measure_links"]

_ROUND_TRIPS: Final = 5


class Burst(NamedTuple):
    """Messages sent back to back, as a group of micro-batches sends them."""

    messages: int
    nbytes: int


def measure_links(
    connections: Connections, stage: int, stages: int, bursts: Sequence[Burst], device: torch.device
) -> dict[Link, tuple[float, ...]]:
    """For each link between neighbours on which `stage` receives, per burst: milliseconds of a message.

    All stages of a pipeline call it, between batches; nothing is under way when it returns. Receives are posted ahead,
    as in a batch, so that a message's time is its share of the burst's, end to end. All bursts follow each other, on
    all links of one direction at once, then of the other, as a pipeline uses them. Needs memory for two messages of the
    largest size.
    """
    probe = _Probe(connections, stage, stages, max(burst.nbytes for burst in bursts), device)
    latency_ms = probe.latencies_ms()
    return {
        link: tuple((latency_ms[link] + ms) / burst.messages for burst, ms in zip(bursts, taken_ms, strict=True))
        for link, taken_ms in (probe.round_ms(True, bursts) | probe.round_ms(False, bursts)).items()
    }


class _Probe:
    """One stage's part.

    Times are taken where messages arrive: the clocks of two nodes cannot be compared, and an answer would share its way
    back with whatever else goes there. A burst takes from the end of what came before it on the link, which is a
    message that goes ahead of all bursts, until its own end; and the link's latency, which is half of what a byte takes
    there and back.
    """

    def __init__(
        self, connections: Connections, stage: int, stages: int, most_bytes: int, device: torch.device
    ) -> None:
        self._channels = connections.channels
        self._stage = stage
        self._stages = stages
        self._device = device
        before, behind = stage - 1, stage + 1
        #: This stage's ends, None where the line of stages ends: with the stage before it, with the one behind it.
        self._from_before = Link("forward", before, stage) if stage > 0 else None
        self._to_before = Link("backward", stage, before) if stage > 0 else None
        self._from_behind = Link("backward", behind, stage) if behind < stages else None
        self._to_behind = Link("forward", stage, behind) if behind < stages else None
        # Ones: pages of zeros would all be the same one, in the processor's cache. Nobody reads what arrives, so that
        # all messages may have the same memory.
        self._sent = torch.ones(most_bytes, dtype=torch.uint8, device=device)
        self._received = torch.ones_like(self._sent)

    def latencies_ms(self) -> dict[Link, float]:
        """Of a byte, on the links on which this stage receives; every other pair of stages, then those between."""
        found = {}
        for first in (0, 1):
            leads = self._stage % 2 == first
            into, out = (self._from_behind, self._to_behind) if leads else (self._from_before, self._to_before)
            if into is not None and out is not None:
                trips = [self._round_trip_ms(into, out, leads) for _ in range(1 + _ROUND_TRIPS)]
                # The first one waits for the other stage too.
                found[into] = median(trips[1:]) / 2
        return found

    def round_ms(self, forwards: bool, bursts: Sequence[Burst]) -> dict[Link, list[float]]:
        """Have all links of one direction carry `bursts`; ms of each where it arrives here."""
        into, out = (self._from_before, self._to_behind) if forwards else (self._from_behind, self._to_before)
        # All stages set out together: a token passes to the last one and comes back.
        self._wait(self._receive(self._from_before))
        self._wait(self._send(self._to_behind))
        self._wait(self._receive(self._from_behind))
        returned = self._send(self._to_before)
        arriving, leaving = [], []
        first = min(burst.nbytes for burst in bursts)
        for nbytes in (first, *(burst.nbytes for burst in bursts for _ in range(burst.messages))):
            arriving.append(self._receive(into, nbytes))
            leaving.append(self._send(out, nbytes))
        messages = iter(arriving)
        self._wait(next(messages))
        ends = [time.perf_counter()]
        for burst in bursts:
            self._wait(*islice(messages, burst.messages))
            ends.append(time.perf_counter())
        self._wait(returned, *leaving)
        return {} if into is None else {into: [(end - start) * 1e3 for start, end in pairwise(ends)]}

    def _round_trip_ms(self, into: Link, out: Link, leads: bool) -> float:
        start = time.perf_counter()
        if leads:
            answer = self._receive(into)
            self._wait(self._send(out), answer)
        else:
            self._wait(self._receive(into))
            self._wait(self._send(out))
        return (time.perf_counter() - start) * 1e3

    def _send(self, link: Link | None, nbytes: int = 1) -> Transfer | None:
        return None if link is None else self._channels[link].send([self._sent[:nbytes]])

    def _receive(self, link: Link | None, nbytes: int = 1) -> Transfer | None:
        return None if link is None else self._channels[link].receive([self._received[:nbytes]])

    def _wait(self, *transfers: Transfer | None) -> None:
        """Have the host wait, which on CUDA would only have told the device to."""
        for transfer in transfers:
            if transfer is not None:
                transfer.wait()
        if self._device.type == "cuda":
            # Not the whole device: other transfers may be waiting for this stage.
            torch.cuda.current_stream(self._device).synchronize()
