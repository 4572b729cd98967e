"""From a graph and a source of times to a profile, for one micro-batch size or for any (DawnPiper §3.2, C.1)."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Sequence

import torch

from evenpipe.partition.counting import Counts, between, count
from evenpipe.partition.profile import Node, Origin, Parameter, Profile
from evenpipe.partition.timing import NodeTimes, Roofline, TimeSource
from evenpipe.partition.trace import Graph

__all__ = ["Profiles", "profile"]

Progress = Callable[[int, int], None]


def profile(graph: Graph, source: TimeSource, model: str, progress: Progress = lambda done, total: None) -> Profile:
    """Each node's times by `source`, and bytes by the kernels of the device that the source is of.

    `model`: its name, for the origin. `progress(done, total)` is called as it counts, and then as it measures.
    """
    counts = count(graph, source.device_type, progress)
    times = source.times(graph, [node.work for node in counts.nodes], counts.precision, progress)
    return _assembled(counts, times, source, model)


class Profiles:
    """A model's profiles for any micro-batch size, by a roofline, from two of them.

    Bytes and work grow by the same with every sample, from two samples on; with one, dimensions of one make views of
    what else are copies, so that size is counted for itself.
    """

    def __init__(
        self,
        graph_of: Callable[[int], Graph],
        roofline: Roofline,
        model: str,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """`graph_of(size)` traces the model with micro-batches of that size."""
        self._graph_of = graph_of
        self._roofline = roofline
        self._model = model
        first, second = (graph_of(size) for size in (2, 3))
        total = 2 * 2 * len(first.nodes)
        low = count(first, roofline.device_type, lambda done, _: progress(done, total))
        high = count(second, roofline.device_type, lambda done, _: progress(total // 2 + done, total))
        self._known = {2: low, 3: high}

    def at(self, micro_batch_size: int) -> Profile:
        """The profile for micro-batches of that size, at least 1."""
        if micro_batch_size not in self._known:
            self._known[micro_batch_size] = self._count(micro_batch_size)
        counts = self._known[micro_batch_size]
        times = self._roofline.times(None, [node.work for node in counts.nodes], counts.precision)
        return _assembled(counts, times, self._roofline, self._model)

    def _count(self, micro_batch_size: int) -> Counts:
        found = between(self._known[2], self._known[3], micro_batch_size) if micro_batch_size > 1 else None
        return found or count(self._graph_of(micro_batch_size), self._roofline.device_type)


def _assembled(counts: Counts, times: Sequence[NodeTimes], source: TimeSource, model: str) -> Profile:
    allocated = [0] * len(counts.nodes)
    released = [0] * len(counts.nodes)
    for storage in counts.storages:
        if storage.producer >= 0:
            allocated[storage.producer] += storage.nbytes
            if not storage.savers:
                released[max(storage.producer, *storage.users, -1)] += storage.nbytes
    first: list[list[Parameter]] = [[] for _ in counts.nodes]
    for parameter in counts.parameters:
        first[parameter.users[0]].append(parameter)
    nodes = tuple(
        Node(
            name=node.name,
            forward_ms=times[number].forward_ms,
            backward_ms=times[number].backward_ms,
            activation_bytes=allocated[number],
            parameter_bytes=sum(parameter.nbytes for parameter in first[number]),
            gradient_bytes=sum(parameter.gradient_bytes for parameter in first[number]),
            optimizer_bytes=sum(parameter.optimizer_bytes for parameter in first[number]),
            released_bytes=released[number],
            output_bytes=node.output_bytes,
            cut_allowed=node.cut_allowed,
            cut_bytes=node.cut_bytes,
            random=node.random,
        )
        for number, node in enumerate(counts.nodes)
    )
    origin = Origin(
        model=model,
        micro_batch_size=counts.micro_batch_size,
        device=source.device,
        precision=counts.precision,
        source=source.name,
        digest=counts.digest,
        versions=_versions(),
        autocast=counts.autocast,
        attention=counts.attention,
    )
    return Profile(
        origin=origin,
        nodes=nodes,
        storages=counts.storages,
        parameters=counts.parameters,
        layer_ends=counts.layer_ends,
    )


def _versions() -> dict[str, str]:
    """Of what decides which operations a model consists of."""
    versions = {"torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["transformers"] = importlib.metadata.version("transformers")
    return versions
