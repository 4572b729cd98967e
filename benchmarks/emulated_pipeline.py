"""One stage of a pipeline on an emulated network: real messages, compute that sleeps."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from emulated_network import INTERFACE, EmulatedNetwork
from emulation import Accelerator, clock_ms, emulated_stage, over_wires, sleep_until

from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import Link, Program, links, loop
from evenpipe.tuner.links import Burst, Ends, measure_links

__all__ = ["STAGES", "Compute", "EmulatedPipeline", "live_on", "message_bytes"]

STAGES: Final = 4

# Long enough for every process to have left the broadcast of the start.
_START_DELAY_MS: Final = 20.0
# Of what a link carries, the headers of Ethernet, IP and TCP left out.
_GOODPUT: Final = 1448 / 1514
_CPU: Final = torch.device("cpu")


class Compute(NamedTuple):
    """A stage's part of one micro-batch: milliseconds of both ways, and the bytes that it sends on."""

    forward_ms: float
    backward_ms: float
    message_bytes: int


def message_bytes(mbit: int, transfer_ms: float) -> int:
    """Of a message that takes so long on a link of that rate; whole floats."""
    return int(mbit * 1e6 / 8 * _GOODPUT * transfer_ms / 1e3) // 4 * 4


def live_on(network: EmulatedNetwork, node: int) -> None:
    """What the process of a stage does first."""
    # Whatever this process waits for, it ends when it is told to.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    network.enter(node)


class EmulatedPipeline:
    """This rank's stage of a pipeline with one stage a rank; its links stay open from batch to batch."""

    def __init__(self) -> None:
        self.stage = dist.get_rank()
        self.stages = dist.get_world_size()
        self._accelerator = Accelerator(0.0, 0.0)
        self.connections = connect(range(self.stages), links(loop(self.stages)), backend="gloo", device=_CPU)
        self._executor = Executor(self.stage, over_wires(self.connections, self._accelerator, 0.0), _CPU)

    def batch_ms(self, program: Program, compute: Compute) -> float:
        """Carry out one batch; from the common start until the last stage is done."""
        self._accelerator.forward_ms, self._accelerator.backward_ms = compute.forward_ms, compute.backward_ms
        start = torch.tensor(clock_ms() + _START_DELAY_MS, dtype=torch.float64)
        dist.broadcast(start, 0)
        self._accelerator.start(start.item())
        is_last = self.stage == self.stages - 1
        self._executor.run(program, emulated_stage(self._accelerator, 4, is_last, compute.message_bytes))
        took = torch.tensor(clock_ms() - start.item(), dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    def message_ms(self, bursts: Sequence[Burst]) -> list[dict[Link, float]]:
        """Measure all links once; per burst and link the milliseconds of a message, the same on all ranks."""
        mine = measure_links(Ends(self.connections, self.stage, self.stages, _CPU), bursts)
        every: list[Any] = [None] * self.stages
        dist.all_gather_object(every, mine)
        return [
            {link: by_burst[number] for measured in every for link, by_burst in measured.items()}
            for number in range(len(bursts))
        ]

    def rest(self, for_ms: float) -> None:
        """All stages wait for each other, and so long."""
        dist.barrier()
        sleep_until(clock_ms() + for_ms)

    def close(self) -> None:
        """Close the links."""
        self.connections.close()
