"""All that is counted of a graph, for a micro-batch of one size, or by two of them for any."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from evenpipe.partition.counting.memory import count_memory
from evenpipe.partition.counting.work import Effort, Work, count_work
from evenpipe.partition.profile import Parameter, Storage
from evenpipe.partition.trace import Graph
from evenpipe.runtime.precisions import precision_name

__all__ = ["Counts", "NodeCounts", "between", "count", "graph_digest"]

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


class NodeCounts(NamedTuple):
    """One node: what `evenpipe.partition.profile.Node` says of it, without times, and its work."""

    name: str
    random: bool
    cut_allowed: bool
    cut_bytes: int
    output_bytes: int
    work: Work


@dataclass(frozen=True)
class Counts:
    """A graph's nodes, storages and parameters. `digest`: of operations and shapes, whatever the micro-batch size.

    `autocast`: the precision of the `torch.autocast` that the graph was traced under. `attention`: the model's kind.
    """

    nodes: tuple[NodeCounts, ...]
    storages: tuple[Storage, ...]
    parameters: tuple[Parameter, ...]
    layer_ends: tuple[int, ...]
    micro_batch_size: int
    precision: str
    digest: str
    autocast: str | None = None
    attention: str | None = None


def count(graph: Graph, device_type: str, progress: Callable[[int, int], None] = lambda done, total: None) -> Counts:
    """Counts with the kernels that `device_type`, "cpu" or "cuda", runs; `progress(done, total)` as it goes."""
    total = 2 * len(graph.nodes)
    memory = count_memory(graph, device_type, lambda done, _: progress(done, total))
    works = count_work(graph, device_type, lambda done, _: progress(len(graph.nodes) + done, total))
    nodes = tuple(
        NodeCounts(
            name=name,
            random=graph.observed[node].random,
            cut_allowed=graph.cut_allowed[number],
            cut_bytes=graph.cut_bytes(number),
            output_bytes=memory.outputs[number],
            work=works[number],
        )
        for number, (name, node) in enumerate(zip(graph.names, graph.nodes, strict=True))
    )
    return Counts(
        nodes=nodes,
        storages=memory.storages,
        parameters=memory.parameters,
        layer_ends=graph.layer_ends,
        micro_batch_size=graph.micro_batch_size,
        precision=_precision(graph),
        digest=graph_digest(graph),
        autocast=precision_name(graph.autocast),
        attention=graph.attention,
    )


def between(low: Counts, high: Counts, micro_batch_size: int) -> Counts | None:
    """The counts at a third size: a sample adds the same bytes and work to each node and storage, whatever the number.

    None where the two differ in more than size, so that nothing follows for a third.
    """
    if _structure(low) != _structure(high):
        return None
    span, distance = high.micro_batch_size - low.micro_batch_size, micro_batch_size - low.micro_batch_size

    def line(first: int, second: int) -> int:
        return first + (second - first) * distance // span

    def effort(first: Effort, second: Effort) -> Effort:
        return Effort(*map(line, first, second))

    nodes = tuple(
        a._replace(
            cut_bytes=line(a.cut_bytes, b.cut_bytes),
            output_bytes=line(a.output_bytes, b.output_bytes),
            work=Work(effort(a.work.forward, b.work.forward), effort(a.work.backward, b.work.backward)),
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


def _precision(graph: Graph) -> str:
    """The type in which most of the parameters are."""
    elements: dict[torch.dtype, int] = {}
    for parameter in graph.module.parameters():
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    most = max(elements, key=lambda dtype: elements[dtype], default=torch.float32)
    return _PRECISIONS.get(most, str(most))


def graph_digest(graph: Graph) -> str:
    """Of operations, shapes and parameters, whatever the micro-batch size."""
    digest = hashlib.sha256()
    for line in _lines(graph):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _lines(graph: Graph) -> Iterator[object]:
    """What makes a graph another one; not whole numbers, which may be sizes, nor the prefix."""
    for name, tensor in sorted(graph.inputs.items()):
        yield name, tuple(tensor.shape[1:]), tensor.dtype
    for name, parameter in _named(graph.module.named_parameters(), graph.module.named_buffers()):
        yield name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad
    if graph.autocast is not None:
        yield "autocast", graph.autocast
    index = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        values = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, float | bool | str)]
        held = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
        yield str(node.target), [index[source] for source in node.all_input_nodes if source in index], held, values


def _named(*of: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return sorted((pair for pairs in of for pair in pairs), key=lambda pair: pair[0])
