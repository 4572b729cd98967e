"""The bandwidth that evictions and loads need (BPipe, appendix B), compared with what a job's links carry."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from evenpipe.schedule import partner

__all__ = [
    "JobLayout",
    "MeasuredPair",
    "ModelShape",
    "Need",
    "ProcessLocation",
    "Recompute",
    "bandwidth_warnings",
    "estimated_need",
    "forward_flops",
    "print_for_a_log",
    "required_gbps",
    "transfer_bytes",
]

Recompute = Literal["none", "selective", "full"]
"""What the backward recomputes: nothing, the attention of each layer, or each layer (Megatron's names)."""


@dataclass(frozen=True)
class ModelShape:
    """A Transformer in the symbols of Table 5: layers L, heads H, hidden size D (h in the equations), sequence l."""

    layers: int
    heads: int
    hidden: int
    sequence_length: int


class MeasuredPair(NamedTuple):
    """An evictor and its acceptor (stages), and the GB/s (10^9 bytes/s) of the slower direction between them."""

    evictor: int
    acceptor: int
    crosses_nodes: bool
    gbps: float


class Need(NamedTuple):
    """GB/s (10^9 bytes/s) that hide a transfer behind one forward, and in words where the number comes from."""

    strict_gbps: float
    origin: str


def transfer_bytes(
    shape: ModelShape, p: int, t: int, b: float, recompute: Recompute, *, sequence_parallel: bool
) -> float:
    """Bytes that one GPU saves for one micro-batch of size b, in 16-bit precision; one eviction moves all of them.

    p stages, t tensor-parallel. With L, H, h, l of ``shape``, and with sequence parallelism:
    none: Llbh/(pt) * (34 + 5Hl/h) (Eq. 4); selective: 34 Llbh/(pt) (Eq. 5); full: 2 Llbh/(pt).
    Without it, 34/t is 10 + 24/t (Korthikanti et al., 2022, Eq. 2), and full is 2 Llbh/p (Eq. 6).

    Raises:
        ValueError: an unknown recompute scope.
    """
    llbh = shape.layers * shape.sequence_length * b * shape.hidden
    shared = t if sequence_parallel else 1
    if recompute == "full":
        return 2 * llbh / (p * shared)
    if recompute not in ("none", "selective"):
        raise ValueError(f"recompute scope {recompute!r} is unknown: choose none, selective or full")
    attention = 5 * shape.heads * shape.sequence_length / shape.hidden if recompute == "none" else 0
    return llbh / p * (10 / shared + (24 + attention) / t)


def forward_flops(shape: ModelShape, p: int, t: int, b: float) -> float:
    """Floating-point operations of one stage's forward of a micro-batch of size b, on one GPU.

    L/p layers of 24 b l h^2 + 4 b l^2 h (Narayanan et al., 2021, appendix), over t tensor-parallel GPUs.
    """
    h, l = shape.hidden, shape.sequence_length  # noqa: E741
    return shape.layers / p * (24 * b * l * h**2 + 4 * b * l**2 * h) / t


def required_gbps(nbytes: float, forward_ms: float) -> float:
    """Return the GB/s (10^9 bytes/s) that a transfer of ``nbytes`` needs to stay hidden behind one forward (Eq. 7-9).

    Raises:
        ValueError: a forward time that is not positive.
    """
    if forward_ms <= 0:
        raise ValueError(f"forward time is {forward_ms} ms: give the time of one micro-batch's forward")
    return nbytes / (forward_ms / 1e3) / 1e9


_EQUATIONS: Final[dict[Recompute, str]] = {
    "none": "equation 4, attention scores saved",
    "selective": "equation 5, no attention scores saved",
    "full": "equation 6, layers recomputed",
}


def estimated_need(
    shape: ModelShape,
    p: int,
    t: int,
    b: float,
    recompute: Recompute,
    *,
    sequence_parallel: bool,
    fp32: bool,
    flops: float,
) -> Need:
    """Return what a transfer of one micro-batch of size b needs, if a forward runs at ``flops`` a second all the time.

    An upper bound for dense layers with an MLP of four times the hidden size: a real forward takes longer.
    """
    nbytes = transfer_bytes(shape, p, t, b, recompute, sequence_parallel=sequence_parallel) * (2 if fp32 else 1)
    strict = required_gbps(nbytes, forward_flops(shape, p, t, b) / flops * 1e3)
    sequence = f"{'with' if sequence_parallel else 'without'} sequence parallelism, " if t > 1 else ""
    return Need(
        strict,
        f"{nbytes / 2**20:,.1f} MiB a micro-batch ({_EQUATIONS[recompute]}, {sequence}{'32' if fp32 else '16'} bit) "
        f"within a forward, if it ran at the {flops / 1e12:,.3g} TFLOP/s of a matrix product of this shape",
    )


def bandwidth_warnings(
    pairs: Sequence[MeasuredPair], strict: float, *, across_nodes: str, within_nodes: str
) -> tuple[str, ...]:
    """Return a line for each kind of link that is slower than ``strict`` GB/s; empty when all is well.

    ``across_nodes`` and ``within_nodes`` say what to do about pairs of that kind.
    """
    kinds = (("cross nodes", True, across_nodes), ("share a node", False, within_nodes))
    lines = []
    for kind, crosses, remedy in kinds:
        slow = [pair for pair in pairs if pair.crosses_nodes is crosses and pair.gbps < strict]
        if slow:
            lines.append(
                f"{len(slow)} of {len(pairs)} evictor-acceptor pairs {kind} and have slow links (stages "
                f"{_names(slow)}): {min(pair.gbps for pair in slow):.2f} GB/s, {_verdict(slow, strict)}; {remedy}"
            )
    return tuple(lines)


def _names(pairs: Sequence[MeasuredPair], most: int = 4) -> str:
    stages = [f"{evictor}-{acceptor}" for evictor, acceptor in sorted({pair[:2] for pair in pairs})]
    return ", ".join(stages[:most]) + (f" and {len(stages) - most} more" if len(stages) > most else "")


def _verdict(slow: Sequence[MeasuredPair], strict: float) -> str:
    relaxed = strict * 2 / 3  # an eviction and a load within one backward, of two forwards, and one forward (Eq. 10-12)
    if all(pair.gbps >= relaxed for pair in slow):
        return (
            f"below the {strict:.2f} GB/s that hide a transfer behind one forward, above the {relaxed:.2f} GB/s that "
            "hide two behind a backward and a forward: hidden, but for a part of each load where all of a device's "
            "work passes one queue (CUDA_DEVICE_MAX_CONNECTIONS=1)"
        )
    return f"so that training may wait for transfers, which need {relaxed:.2f} to {strict:.2f} GB/s"


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
    def of_this(cls, rank: int, pipeline: int, stage: int, sends_gbps: float | None, flops: float) -> ProcessLocation:
        """Return this process, as torchrun started it. Agents are nodes, even where two share a machine."""
        host, local_rank = socket.gethostname(), int(os.environ.get("LOCAL_RANK", 0))
        node = os.environ.get("GROUP_RANK", host)
        return cls(rank, pipeline, stage, node, host, local_rank, sends_gbps, flops)


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
        """Return every pair that exchanges activations, pipeline by pipeline."""
        pairs = []
        for processes in self._pipelines.values():
            for stage in self._evictors:
                evictor, acceptor = processes[stage], processes[partner(stage, self._stages)]
                gbps = min(process.sends_gbps or 0.0 for process in (evictor, acceptor))
                pairs.append(MeasuredPair(stage, acceptor.stage, evictor.node != acceptor.node, gbps))
        return tuple(pairs)

    def rendered(self, need: Need, order: str, across_nodes: str, within_nodes: str) -> Group:
        """Return the table, and below it the `order` of ranks, needs and speeds of links, warnings of slow ones.

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
        """Return the pipeline of rank 0 as a table, a row a stage; its links need `strict_gbps`."""
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
        """Return a line on how many pipelines sit alike, and how many pairs cross nodes."""
        pairs, pipelines = self.pairs, len(self._pipelines)
        crossing = sum(pair.crosses_nodes for pair in pairs)
        alike = sum(_pattern(processes) == _pattern(self._pipelines[0]) for processes in self._pipelines.values())
        spread = f"all {pipelines}" if alike == pipelines else f"{alike} of {pipelines}"
        replicas = f"{spread} pipelines sit like this one; " if pipelines > 1 else ""
        return f"{replicas}{crossing} of {len(pairs)} pairs cross nodes"


def _pattern(processes: Sequence[ProcessLocation]) -> list[int]:
    """Return for each stage the first stage on its node: the same for pipelines that sit alike on different nodes."""
    nodes = [process.node for process in processes]
    return [nodes.index(node) for node in nodes]


def print_for_a_log(printed: Group) -> None:
    """Print on standard output, in wide lines where that is no terminal."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_LOG
    console.print(printed, soft_wrap=True)
    sys.stdout.flush()
