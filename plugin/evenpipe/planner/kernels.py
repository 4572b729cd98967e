"""Seconds of matrix products, element-wise kernels, collectives and messages on one device of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import starmap
from math import ceil
from typing import Final

from evenpipe.descriptions import Cluster
from evenpipe.planner.operations.operation import (
    Collective,
    Dispatch,
    FusedAttention,
    Gemm,
    Group,
    Moved,
    Operation,
    Pass,
    Work,
)
from evenpipe.planner.run import Dispatcher, Run

__all__ = ["FITTED", "UNFITTED", "Calibration", "Kernels", "Links", "in_pairs"]


@dataclass(frozen=True)
class Calibration:
    """gemm: share of a device's fastest matrix product that large ones reach in training. unfused: time of a softmax
    that is not fused, relative to its counted bytes. peer: share of a node's links that a collective reaches.

    depth: the inner dimension at which a bf16 matrix product reaches half of its rate, that of a tile's start and end.
    copy, node: share of a node's links that plain copies reach, and of what leaves it. hidden, buffered: what a
    collective costs the matrix product that it hides behind. narrow_attention, around: relative to bf16's on one GPU.
    """

    gemm: float
    unfused: float
    peer: float
    depth: float = 128.0  # a prologue and an epilogue of four steps of 32, by CUTLASS's tiles
    copy: float = 0.83  # BPipe Tables 3 and 4 with Eq. 4 to 6: 222 to 266 GB/s of 300
    node: float = 0.90  # nccl-tests over InfiniBand: 22 to 23 of 25 GB/s
    hidden: float = 0.15  # Calculon's `processor_usage` of NVLink's collectives (Isaev et al. 2023)
    buffered: float = 0.30  # the same with user buffers, whose copies take 16 of 132 multiprocessors, and bandwidth
    beside_experts: float = (
        0.704  # share of a dispatch hidden behind another micro-batch's compute: fitted (recipes_fit.py)
    )
    dispatch: float = 1.39e-4  # s beside its bytes, in a graph of the whole iteration: fitted on the same
    narrow_attention: float = 1.25  # FP8 attention over bf16's, forward and backward (FlashAttention-3: 1.2 to 1.6)
    around: float = 0.85  # of a fused attention's rate, left to one around a ring, in smaller pieces: set by hand


#: gemm, unfused and peer by least squares on the 26 rows of BPipe Table 7 that Megatron ran alone and that are taken
#: (`benchmarks/planner_truth.py` fits them again).
FITTED: Final = Calibration(gemm=0.886, unfused=1.233, peer=0.751)

#: Without any fit. gemm: 8192³ on random data, about 250 TFLOP/s on an A100, of 271 at the shape that is best;
#: unfused: the counted bytes; peer: nccl-tests on a node of 8 A100, about 230 of 300 GB/s.
UNFITTED: Final = Calibration(gemm=0.92, unfused=1.0, peer=0.77)


def in_pairs(run: Run, cluster: Cluster) -> bool:
    """Return whether BPipe's partner stages are next to each other: where a node has room for two."""
    return run.bpipe and 2 * run.together <= cluster.gpus_per_node


class Links:
    """Ranks are placed as Megatron does: tensor, then context, then data, then pipeline; pipeline before data where the
    run's ``placement`` has it, and with BPipe, partner stages next to each other, where a node has room for two (BPipe
    §3.5).
    """

    def __init__(self, run: Run, cluster: Cluster, calibration: Calibration) -> None:
        self._run = run
        self._cluster = cluster
        self._calibration = calibration
        self._node = cluster.node_gbps * 1e9 * calibration.node

    def collective(self, nbytes: float, group: Group) -> float:
        """Return seconds of a collective in which each rank sends so many bytes."""
        t, c = self._run.tensor, self._run.context
        size, stride = (t, 1) if group == "tensor" else (c, t)
        return nbytes / self._ring(size, stride) + self._latency(size * stride) * 1e-6

    def reduction(self, nbytes: float, experts: bool = False) -> float:
        """Return seconds of a ring over the ranks that have the same parameters, in which each sends so many bytes."""
        run = self._run
        size, stride = run.replicas, run.tensor
        if experts:
            size, stride = run.expert_replicas, run.expert_ways * run.expert
        if self._pipelines_first:
            stride *= run.stages
        return nbytes / self._ring(size, stride) if size > 1 else 0.0

    def between_ends(self, nbytes: float) -> float:
        """Return seconds in which the first stage and the last sum so many bytes that each of them has."""
        run = self._run
        if (
            in_pairs(run, self._cluster) or self._span <= self._cluster.gpus_per_node
        ):  # the first and the last are a pair of BPipe's
            return nbytes / self._peer(2)
        return nbytes / self._ring(2, self._span // run.stages * (run.stages - 1)) if nbytes else 0.0

    def message(self, nbytes: float) -> tuple[float, float]:
        """Latency of a hand-over between neighbours, and seconds on the link; at the slowest boundary."""
        rate = self._node if self._span > self._cluster.gpus_per_node else self._peer(2)
        return self._latency(self._span) * 1e-6, nbytes / rate

    @property
    def _pipelines_first(self) -> bool:
        """Return whether a pipeline is placed before the next one, rather than replicas of a stage side by side."""
        return in_pairs(self._run, self._cluster) or self._run.placement == "pipeline"

    @property
    def _span(self) -> int:
        """Ranks from a pipeline's first to its last."""
        return self._run.gpus // self._run.data if self._pipelines_first else self._run.gpus

    def eviction(self, nbytes: float) -> tuple[float, float]:
        """Latency and seconds on the link between partner stages, which are in one node if it has room for both."""
        both = 2 * self._run.together
        inside = both <= self._cluster.gpus_per_node
        rate = self._peer(2) / self._calibration.peer * self._calibration.copy if inside else self._node
        return self._latency(both) * 1e-6, nbytes / rate

    def _peer(self, ranks: float) -> float:
        """Bytes/s of a collective of so many ranks of a node; where links are a mesh, it has those between them."""
        return self._cluster.peer_gbps * 1e9 * self._calibration.peer * self._linked(ranks)

    def _linked(self, ranks: float) -> float:
        links = self._cluster.device.peer_links
        return min(1.0, (max(ranks, 2) - 1) / links) if links else 1.0

    def _latency(self, span: int) -> float:
        return self._cluster.latency_us if span <= self._cluster.gpus_per_node else self._cluster.node_latency_us

    def _ring(self, size: int, stride: int) -> float:
        """Bytes/s of a ring. What leaves a node is shared by the rings that do so together; one alone has it all."""
        gpus = self._cluster.gpus_per_node
        peer = self._peer(min(size, max(gpus // stride, 1)))
        return peer if size * stride <= gpus else min(peer, self._node * gpus / min(stride, gpus))

    def dispatch(self, work: Dispatch) -> float:
        """Return seconds in which tokens travel to their experts: to other ranks over the node's links, to other nodes
        over this rank's share of what leaves it.

        NCCL's all-to-all sends a copy of a token for each of its experts; the other dispatchers one to each rank, and
        over the network one to each node, which hands it on (DeepEP; HybridEP). Of n places k choices meet
        n (1 − (1 − 1/n)^k); the rank with the most tokens gets so many more of them.
        """
        run, chosen = self._run, work.chosen
        ranks = run.expert
        nodes = ceil(ranks * run.expert_ways / self._cluster.gpus_per_node)
        copies = abroad = float(chosen)
        if run.dispatcher != "alltoall":
            copies, abroad = _met(ranks, chosen), _met(nodes, chosen)
            if work.nodes is not None:
                abroad = min(abroad, work.nodes)
        near = run.fullest * work.nbytes * copies * (ranks - 1) / ranks
        far = run.fullest * work.nbytes * abroad * (nodes - 1) / nodes
        links, network = _DISPATCHED[run.dispatcher]
        takes = max(
            near / (links * self._cluster.peer_gbps * 1e9 * self._linked(ranks * run.expert_ways)),
            far / (network * self._cluster.node_gbps * 1e9),
        )
        whole = "full_iteration" in run.graphs
        takes += self._calibration.dispatch if whole else self._latency(ranks * run.expert_ways) * 1e-6
        return takes * (1 - self._calibration.beside_experts if run.overlap_experts else 1)


#: Of a node's links and of what leaves it, the share that a dispatcher reaches: set, but of DeepEP over the network,
#: whose documentation (V1) has 43 to 58 GB/s over links of 50; HybridEP's way is the same.
_DISPATCHED: Final[Mapping[Dispatcher, tuple[float, float]]] = {
    "alltoall": (0.6, 0.6),
    "deepep": (0.6, 0.9),
    "hybridep": (0.6, 0.9),
}


def _met(places: int, choices: int) -> float:
    return places * (1 - (1 - 1 / places) ** choices)


_HEAD: Final = 128  # width of heads for which a device's attention is given
_GRAPH_LAUNCH: Final = 1.5e-6  # s from kernel to kernel in a graph: set by hand
_OF_COLLECTIVE: Final = 2  # kernels that the host starts for one: set by hand
_OF_DISPATCH: Final = 3  # the same of a dispatch: set by hand
#: Seconds that a node's processors take for a parameter: ZeRO-Offload (Ren et al. 2021) Table 4, CPU-Adam on a DGX-2:
#: 10 billion parameters in 2.57 s. Newer hosts are faster.
_HOST_STEP: Final = 2.57e-10

#: Tiles that a matrix product is cut into, and what each reaches of the best: shapes by CUTLASS, shares set by hand.
_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.65))
_SPLITS: Final = (1, 2, 4, 8)
_LEAST_SPLIT: Final = 4096  # inner dimension from which cuBLAS splits it: set by hand


class Kernels:
    """How long each work takes under ``run`` on ``cluster``.

    ``like``: kernels of a run with the same precision, quantization and graphs, for which products take as long.
    """

    def __init__(self, run: Run, cluster: Cluster, calibration: Calibration, like: Kernels | None = None) -> None:
        assert run.precision is not None
        device = cluster.device if cluster.slowness == 1 else cluster.device.slowed(cluster.slowness)
        self.links = Links(run, cluster, calibration)
        self._calibration, self._run, self._device = calibration, run, device
        self._flops = device.tflops[run.precision] * 1e12
        self._bytes = device.memory_gbps * 1e9 * device.elementwise
        self._launch = _GRAPH_LAUNCH if "full_iteration" in run.graphs else device.launch_us * 1e-6
        self._hidden = calibration.buffered if run.user_buffers else calibration.hidden
        self._attention = calibration.narrow_attention if run.quantized_attention else 1.0
        self._attention *= calibration.around if run.context > 1 else 1.0
        self._host = 1 / (device.host_gbps * 1e9 * calibration.copy), _HOST_STEP * cluster.gpus_per_node
        self._like = like

    # Made when first asked for: a cache of a method is a cycle, and a search makes many kernels that need neither.
    @cached_property
    def _started(self) -> Callable[[Operation, Pass], list[tuple[float, float, bool]]]:
        return cache(self._started_of)

    @cached_property
    def _product(self) -> Callable[[Gemm], float]:
        return cache(self._gemm) if self._like is None else self._like._product

    def seconds(self, works: Iterable[Work]) -> float:
        """All of them, one after the other; a collective that runs behind a matrix product takes what is left."""
        return sum(map(self._of, works))

    def moved(self, nbytes: float) -> float:
        """Element-wise kernels that read and write so many bytes."""
        return nbytes / self._bytes

    def stepped_on_host(self, parameters: float) -> float:
        """Return the seconds of a step on the host: fp32 gradients go there, and half-precision weights come back.

        All GPUs of a node share its processors and memory.
        """
        return parameters * (6 * self._host[0] + self._host[1])

    def copied_to_host(self, nbytes: float) -> float:
        """Return the seconds of so many bytes on their way to the host, or back."""
        return nbytes * self._host[0]

    def _of(self, work: Work) -> float:
        match work:
            case Gemm():
                return self._product(work)
            case Moved():
                slow = self._calibration.unfused if work.unfused else 1.0
                transposing = work.transposing if self._device.transposing else 0.0
                return self.moved(work.nbytes * slow + transposing) + work.kernels * self._launch
            case FusedAttention():
                # Narrow heads leave half of each product's width empty.
                narrow = min(1.0, work.width / _HEAD)
                rate = self._flops * self._device.attention[work.backward] * self._attention * narrow
                return work.flops / rate + self._launch
            case Collective():
                takes = self.links.collective(work.nbytes, work.group)
                if work.behind is None:
                    return takes
                beside = self._product(work.behind)
                shown = self._cut(takes, work.behind) if work.cut else max(takes - beside, 0.0)
                return shown + self._hidden * min(takes, beside)
            case Dispatch():
                return self.links.dispatch(work)

    def started(self, passes: Iterable[tuple[Operation, Pass]]) -> float:
        """Return the seconds of these operations' passes, no faster than the host starts their kernels.

        Before a dispatcher the host waits for the numbers of tokens, so that its time is not hidden at all.
        """
        takes, kernels, waits = 0.0, 0.0, False
        for each in starmap(self._started, passes):
            for seconds, from_host, awaited in each:
                takes += seconds
                kernels += from_host
                waits = waits or awaited
        host = kernels * self._device.host_us * 1e-6
        return takes + host if waits else max(takes, host)

    def _started_of(self, operation: Operation, which: Pass) -> list[tuple[float, float, bool]]:
        """Return of each work its seconds, how many kernels the host starts for it, and whether it waits before."""
        graphed = "full_iteration" in self._run.graphs or operation.graph in self._run.graphs
        works: Sequence[Work] = getattr(operation, which)
        return [
            (self._of(work), 0 if graphed else self._kernels(work), isinstance(work, Dispatch) and not graphed)
            for work in works
        ]

    def _kernels(self, work: Work) -> float:
        match work:
            case Gemm() | Moved():
                return work.kernels
            case FusedAttention():
                return 1
            case Collective():
                return 2 * self._run.tensor if work.cut else _OF_COLLECTIVE
            case Dispatch():
                return _OF_DISPATCH

    def _cut(self, takes: float, product: Gemm) -> float:
        """Return what a collective in as many steps as there are ranks adds to the product that it is cut along.

        Its last step, or its first, is beside nothing; and smaller products are slower.
        """
        steps = self._run.tensor
        whole, part = self._product(product), self._product(product._replace(m=product.m / steps))
        return max(takes - whole * (steps - 1) / steps, takes / steps) + max(0.0, steps * part - whole)

    def _gemm(self, work: Gemm) -> float:
        """Whole waves of tiles over all multiprocessors, the best of the tiles; never faster than its bytes.

        A tile's start and end take as long whatever its operands are.
        """
        of, device = self._run.quantization if work.quantized else None, self._device
        peak, matmul = (
            (self._flops, device.matmul)
            if of is None
            else (device.tflops[of.rate] * 1e12, device.narrow_matmul.get(of.rate, device.matmul))
        )
        rate = peak * matmul / device.multiprocessors * self._calibration.gemm
        depth = self._calibration.depth * peak / self._flops
        best = min(
            self._waves(work, rows, columns, split) * 2 * rows * columns * (work.k / split + depth) / reached
            for rows, columns, reached in _TILES
            for split in (_SPLITS if work.batch == 1 and work.k >= _LEAST_SPLIT else (1,))
        )
        operands = self._run.operand_bytes(work.quantized) * (work.m * work.k + work.k * work.n)
        nbytes = work.batch * (operands + self._run.element_bytes * work.m * work.n)
        return max(best / rate, self.moved(nbytes)) + self._launch

    def _waves(self, work: Gemm, rows: int, columns: int, split: int) -> int:
        tiles = ceil(work.m / rows) * ceil(work.n / columns) * ceil(work.batch) * split
        return ceil(tiles / self._device.multiprocessors)
