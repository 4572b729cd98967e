"""Which links a group of ranks uses, and how long a message or a collective takes on them."""

from __future__ import annotations

from evenpipe.planner.descriptions import Cluster
from evenpipe.planner.operations.operation import Group
from evenpipe.planner.run import Run
from evenpipe.planner.time.calibration import Calibration

__all__ = ["Links"]


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
        """Seconds of a collective in which each rank sends so many bytes."""
        t, c = self._run.tensor, self._run.context
        if group == "expert":
            return self._all_to_all(nbytes)
        size, stride = (t, 1) if group == "tensor" else (c, t)
        return nbytes / self._ring(size, stride) + self._latency(size * stride) * 1e-6

    def reduction(self, nbytes: float, experts: bool = False) -> float:
        """Seconds of a ring over the ranks that have the same parameters, in which each sends so many bytes."""
        run = self._run
        size, stride = run.replicas, run.tensor
        if experts:
            size, stride = run.expert_replicas, run.expert_ways * run.expert
        if self._pipelines_first:
            stride *= run.stages
        return nbytes / self._ring(size, stride) if size > 1 else 0.0

    def between_ends(self, nbytes: float) -> float:
        """Seconds in which the first stage and the last sum so many bytes that each of them has."""
        run = self._run
        if self._in_pairs or self._span <= self._cluster.gpus_per_node:  # the first and the last are a pair of BPipe's
            return nbytes / self._peer
        return nbytes / self._ring(2, self._span // run.stages * (run.stages - 1)) if nbytes else 0.0

    def message(self, nbytes: float) -> tuple[float, float]:
        """Latency of a hand-over between neighbours, and seconds on the link; at the slowest boundary."""
        rate = self._node if self._span > self._cluster.gpus_per_node else self._peer
        return self._latency(self._span) * 1e-6, nbytes / rate

    @property
    def _pipelines_first(self) -> bool:
        """Whether a pipeline is placed before the next one, rather than replicas of a stage next to each other."""
        return self._in_pairs or self._run.placement == "pipeline"

    @property
    def _in_pairs(self) -> bool:
        return self._run.bpipe and 2 * self._run.together <= self._cluster.gpus_per_node

    @property
    def _span(self) -> int:
        """Ranks from a pipeline's first to its last."""
        return self._run.gpus // self._run.data if self._pipelines_first else self._run.gpus

    def eviction(self, nbytes: float) -> tuple[float, float]:
        """Latency and seconds on the link between partner stages, which are in one node if it has room for both."""
        both = 2 * self._run.together
        inside = both <= self._cluster.gpus_per_node
        rate = self._cluster.peer_gbps * 1e9 * self._calibration.copy if inside else self._node
        return self._latency(both) * 1e-6, nbytes / rate

    @property
    def _peer(self) -> float:
        return self._cluster.peer_gbps * 1e9 * self._calibration.peer

    def _latency(self, span: int) -> float:
        return self._cluster.latency_us if span <= self._cluster.gpus_per_node else self._cluster.node_latency_us

    def _ring(self, size: int, stride: int) -> float:
        """Bytes/s of a ring. What leaves a node is shared by the rings that do so together; one alone has it all."""
        gpus = self._cluster.gpus_per_node
        if size * stride <= gpus:
            return self._peer
        return min(self._peer, self._node * gpus / min(stride, gpus))

    def _all_to_all(self, nbytes: float) -> float:
        """Each rank sends to the others of its node over its links, to those of other nodes by its own part of them."""
        run, gpus = self._run, self._cluster.gpus_per_node
        stride = run.expert_ways
        near = max(1, min(run.expert, gpus // stride))
        far = (run.expert - near) / max(1, run.expert - 1)
        takes = max(nbytes * (1 - far) / self._peer, nbytes * far / self._node)
        return takes + self._latency(run.expert * stride) * 1e-6
