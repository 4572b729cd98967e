"""The stages of a job by node, and what their links need and carry, as the table and the lines that a user reads."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch.distributed as dist
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from evenpipe.runtime.bandwidth import MeasuredPair, Need, bandwidth_warnings
from evenpipe.schedule import partner

__all__ = ["JobLayout", "ProcessLocation", "print_for_a_log"]

_WIDTH_OF_A_LOG: Final = 200
_NO_PAIRS: Final = ("no stage holds more micro-batches than BPipe's bound: nothing will be evicted",)


class ProcessLocation(NamedTuple):
    """One process. `pipeline` is the rank of its first stage; `node` tells nodes apart, `host` is the machine's name.

    `sends_gbps` is how fast it sends to its partner; `flops` is how fast it computes.
    """

    rank: int
    pipeline: int
    stage: int
    node: str
    host: str
    local_rank: int
    sends_gbps: float | None
    flops: float

    @classmethod
    def of_this(cls, pipeline: int, stage: int, sends_gbps: float | None, flops: float) -> ProcessLocation:
        """This process, as torchrun started it. Agents are nodes, even where two of them share a machine."""
        host, local_rank = socket.gethostname(), int(os.environ.get("LOCAL_RANK", 0))
        node = os.environ.get("GROUP_RANK", host)
        return cls(dist.get_rank(), pipeline, stage, node, host, local_rank, sends_gbps, flops)


class JobLayout:
    """All processes of a job, with `evictions`: how many micro-batches each stage evicts in a batch."""

    def __init__(self, processes: Sequence[ProcessLocation], evictions: Sequence[int]) -> None:
        self._stages = len(evictions)
        self._evictors = [stage for stage, count in enumerate(evictions) if count]
        self._pipelines: dict[int, list[ProcessLocation]] = {}
        for process in sorted(processes, key=lambda process: (process.pipeline, process.stage)):
            self._pipelines.setdefault(process.pipeline, []).append(process)

    @property
    def pairs(self) -> tuple[MeasuredPair, ...]:
        """Every pair that exchanges activations, pipeline by pipeline."""
        found = []
        for processes in self._pipelines.values():
            for stage in self._evictors:
                evictor, acceptor = processes[stage], processes[partner(stage, self._stages)]
                gbps = min(process.sends_gbps or 0.0 for process in (evictor, acceptor))
                found.append(MeasuredPair(stage, acceptor.stage, evictor.node != acceptor.node, gbps))
        return tuple(found)

    def rendered(self, need: Need, order: str, across_nodes: str, within_nodes: str) -> Group:
        """The table and the lines below it: the `order` of ranks, what links need and have, and warnings of slow ones.

        The last two say what to do about slow pairs between nodes, and within one.
        """
        pairs = self.pairs
        explained = (
            self.summary(),
            f"needs: at most, estimated: {need.origin}; two thirds of it hide all but a part of the loads",
            "has: measured on these links just now, all pairs at once, in the direction in which the stage sends",
        )
        warnings = bandwidth_warnings(pairs, need.strict_gbps, across_nodes=across_nodes, within_nodes=within_nodes)
        return Group(
            Text("evenpipe: where stages sit, and what the links between partners carry", style="bold"),
            self.table(need.strict_gbps),
            *(Text(f"  {line}") for line in (order, *(explained if pairs else _NO_PAIRS))),
            *(Text(f"  warning: {line}", style="yellow") for line in warnings),
        )

    def table(self, strict_gbps: float) -> Table:
        """The pipeline of rank 0, a row a stage; its links need `strict_gbps`."""
        table = Table("stage", "node", "local rank", "rank", "role", "partner", "link", "needs GB/s", "has GB/s")
        for column in table.columns:
            column.overflow = "fold"
            column.justify = "left" if column.header in ("node", "role", "link") else "right"
        processes = self._pipelines[0]
        for process in processes:
            other = processes[partner(process.stage, self._stages)]
            where = process.host if process.node == process.host else f"{process.node} ({process.host})"
            cells = [str(process.stage), where, str(process.local_rank), str(process.rank)]
            if process.stage in self._evictors or other.stage in self._evictors:
                role = "evictor" if process.stage in self._evictors else "acceptor"
                link = "same node" if process.node == other.node else "between nodes"
                cells += [role, str(other.stage), link, f"{strict_gbps:.2f}", f"{process.sends_gbps or 0.0:.2f}"]
            else:
                cells += ["alone", "", "", "", ""]
            table.add_row(*cells)
        return table

    def summary(self) -> str:
        """How many pipelines sit alike, and how many pairs cross nodes."""
        pairs, pipelines = self.pairs, len(self._pipelines)
        crossing = sum(pair.crosses_nodes for pair in pairs)
        alike = sum(_pattern(processes) == _pattern(self._pipelines[0]) for processes in self._pipelines.values())
        spread = f"all {pipelines}" if alike == pipelines else f"{alike} of {pipelines}"
        replicas = f"{spread} pipelines sit like this one; " if pipelines > 1 else ""
        return f"{replicas}{crossing} of {len(pairs)} pairs cross nodes"


def _pattern(processes: Sequence[ProcessLocation]) -> list[int]:
    """For each stage, the first stage on its node: the same for pipelines that sit alike on different nodes."""
    nodes = [process.node for process in processes]
    return [nodes.index(node) for node in nodes]


def print_for_a_log(printed: Group) -> None:
    """On standard output, in wide lines where that is no terminal."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_LOG
    console.print(printed, soft_wrap=True)
    sys.stdout.flush()
