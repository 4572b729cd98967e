"""A cluster: equal nodes of equal GPUs."""

from __future__ import annotations

from pydantic import Field

from evenpipe.planner.descriptions.described import Described
from evenpipe.planner.descriptions.devices import Device

__all__ = ["Cluster"]


class Cluster(Described):
    """``nodes`` of ``gpus_per_node`` GPUs.

    peer_gbps: 10^9 bytes/s of a GPU to others in its node, one way; the device's own, if left out. node_gbps: of a GPU
    to other nodes, one way: its share of what leaves the node. latency_us: of a message or a step of a collective
    between GPUs of a node, node_latency_us: between nodes.
    """

    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    device: Device
    peer_gbps: float = Field(gt=0)
    node_gbps: float = Field(gt=0)
    latency_us: float = Field(ge=0)
    node_latency_us: float = Field(ge=0)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def of_size(self, nodes: int, gpus_per_node: int) -> Cluster:
        """So many of its nodes with so many GPUs each, among which what leaves a node is shared."""
        share = self.node_gbps
        if gpus_per_node != self.gpus_per_node:
            share = min(share * self.gpus_per_node / gpus_per_node, max(share, self.device.host_gbps))
        return self.model_copy(update={"nodes": nodes, "gpus_per_node": gpus_per_node, "node_gbps": share})
