"""From a graph and a source of times to a profile, for one micro-batch size or for any (DawnPiper §3.2, C.1)."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from evenpipe.partition.counting import Counts, Effort, Progress, Work, count
from evenpipe.partition.profile import Node, Origin, Parameter, Profile
from evenpipe.partition.timing import NodeTimes, Roofline, TimeSource
from evenpipe.partition.trace import Graph

__all__ = ["Profiles", "between", "profile"]


def profile(graph: Graph, source: TimeSource, model: str, progress: Progress = lambda done, total: None) -> Profile:
    """Return each node's times by `source`, and bytes by the kernels of the device that the source is of.

    `model`: its name, for the origin. `progress(done, total)` is called as it counts, and then as it measures.
    """
    counts = count(graph, source.device_type, progress)
    times = source.times(graph, [node.work for node in counts.nodes], counts.precision, progress)
    return _assembled(counts, times, source, model)


class Profiles:
    """A model's profiles for any micro-batch size, by a roofline, from two of them.

    Bytes and work grow by the same with every sample, from two samples on. With one sample, views of dimensions of one
    take the place of copies, so that size is counted for itself.
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
        half = len(first.nodes)
        low = count(first, roofline.device_type, lambda done, _: progress(done, 2 * half))
        high = count(second, roofline.device_type, lambda done, _: progress(half + done, 2 * half))
        self._counts = {2: low, 3: high}

    def at(self, micro_batch_size: int) -> Profile:
        """Return the profile for micro-batches of that size, at least 1."""
        if micro_batch_size not in self._counts:
            counts = between(self._counts[2], self._counts[3], micro_batch_size) if micro_batch_size > 1 else None
            counts = counts or count(self._graph_of(micro_batch_size), self._roofline.device_type)
            self._counts[micro_batch_size] = counts
        counts = self._counts[micro_batch_size]
        times = self._roofline.times(None, [node.work for node in counts.nodes], counts.precision)
        return _assembled(counts, times, self._roofline, self._model)


def between(low: Counts, high: Counts, micro_batch_size: int) -> Counts | None:
    """Return the counts at a third size, as a sample adds the same bytes and work to each node and storage.

    None where the two differ in more than size, so that nothing follows for a third.
    """
    if _structure(low) != _structure(high):
        return None
    span, distance = high.micro_batch_size - low.micro_batch_size, micro_batch_size - low.micro_batch_size

    def line(first: int, second: int) -> int:
        return first + (second - first) * distance // span

    nodes = tuple(
        a._replace(
            cut_bytes=line(a.cut_bytes, b.cut_bytes),
            output_bytes=line(a.output_bytes, b.output_bytes),
            left_bytes=line(a.left_bytes, b.left_bytes),
            work=Work(*(Effort(*map(line, *efforts)) for efforts in zip(a.work, b.work, strict=True))),
        )
        for a, b in zip(low.nodes, high.nodes, strict=True)
    )
    storages = tuple(
        a.model_copy(update={"nbytes": line(a.nbytes, b.nbytes)})
        for a, b in zip(low.storages, high.storages, strict=True)
    )
    return replace(low, nodes=nodes, storages=storages, micro_batch_size=micro_batch_size)


def _structure(counts: Counts) -> tuple[object, ...]:
    return (
        [(node.name, node.cut_allowed) for node in counts.nodes],
        [(storage.producer, storage.users, storage.savers) for storage in counts.storages],
        counts.parameters,
        counts.layer_ends,
        counts.digest,
    )


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
            left_bytes=node.left_bytes,
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
    """Return the versions of the packages that decide which operations a model consists of."""
    versions = {"torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["transformers"] = importlib.metadata.version("transformers")
    return versions
