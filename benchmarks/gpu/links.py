"""How fast the links between BPipe's partners are; over NCCL also what communicators take: memory, and SMs.

SMs are not told by anybody: they are what matrix products lose beside receives that wait for their message, as a
share of the device's.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from evenpipe.runtime.communicators import communicator_bytes, ctas
from evenpipe.runtime.connections import Connections, connect
from evenpipe.runtime.timing import clock_for, sending_gbps
from evenpipe.schedule import links, loop

from .rank import Rank

__all__ = ["run"]

_MIB: Final = 2**20


def run(rank: Rank) -> None:
    with rank.world(rank.ranks):
        opened, backend = links(loop(rank.ranks), pairs=True), "nccl" if rank.over_nccl else "gloo"
        if rank.over_nccl:
            connect(range(rank.ranks), opened, backend, rank.device).close()  # what is taken once is taken here
        before = torch.cuda.mem_get_info()[0] if rank.over_nccl else 0
        connections = connect(range(rank.ranks), opened, backend, rank.device)
        if rank.over_nccl:
            taken, expected = before - torch.cuda.mem_get_info()[0], communicator_bytes(os.environ) / _MIB
            each = taken / len(connections.channels) / _MIB
            rank.row(f"memory of a communicator, stage {rank.number}", each, "MiB", expected)
        sending_gbps(connections, rank.number, rank.device)  # the first message of a size has memory pinned
        gbps = sending_gbps(connections, rank.number, rank.device)
        if gbps is not None:
            rank.row(f"stage {rank.number} to its partner", gbps, "GB/s")
        if rank.place == "nccl":
            _count_sms(rank, connections)
        connections.close()
    if not rank.over_nccl:
        why = "NCCL takes no two ranks on one GPU; links were measured through the host's memory"
        rank.unchecked("NCCL's links, communicators and SMs", why)
    elif rank.place == "nccl-shared":
        rank.unchecked("NCCL's links between GPUs, and SMs", "the stages share one GPU, whose time they take in turn")


def _count_sms(rank: Rank, connections: Connections) -> None:
    ends = connections.channels.values()
    outgoing, incoming = ([end for end in ends if (end.source == rank.number) is out] for out in (True, False))
    byte = torch.zeros(1, dtype=torch.uint8, device=rank.device)
    alone_ms = _products_ms(rank.device)
    transfers = [channel.receive([byte.clone()]) for channel in incoming]
    beside_ms = _products_ms(rank.device)
    rank.meet()
    for transfer in [channel.send([byte]) for channel in outgoing] + transfers:
        transfer.wait()
    every = torch.cuda.get_device_properties(rank.device).multi_processor_count
    what = f"taken by {len(incoming)} waiting receives, stage {rank.number}"
    rank.row(what, every * max(0.0, 1 - alone_ms / beside_ms), "SMs", len(incoming) * ctas(os.environ))


def _products_ms(device: torch.device) -> float:
    """Milliseconds of matrix products; waits for nothing else on the device."""
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    product, clock = torch.empty_like(left), clock_for(device)
    for _ in range(3):
        torch.matmul(left, left, out=product)
    start = clock.mark()
    for _ in range(20):
        torch.matmul(left, left, out=product)
    return clock.elapsed_ms(start, clock.mark())
