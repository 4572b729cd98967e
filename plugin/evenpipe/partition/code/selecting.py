"""Which of a graph's nodes a part computes, in the model's own order, and what it takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from evenpipe.partition.code.part import Boundary
from evenpipe.partition.trace import Graph

__all__ = ["Selected", "select"]


@dataclass(frozen=True)
class Selected:
    """One part. `first`, `last`: its nodes in the graph; `body`: what it runs, with what it needs of the prefix.

    Its nodes run as the model itself would run them, not by depth: then gradients of what they use several times add
    up in the model's own order, and the code reads as the user's does.
    """

    first: int
    last: int
    body: tuple[fx.Node, ...]
    received: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]


def select(graph: Graph, cuts: Sequence[int]) -> list[Selected]:
    """The parts of a graph that is cut behind these nodes."""
    starts = [0, *(cut + 1 for cut in cuts)]
    ends = [*cuts, len(graph.nodes) - 1]
    return [_select(graph, first, last) for first, last in zip(starts, ends, strict=True)]


def _select(graph: Graph, first: int, last: int) -> Selected:
    own = set(graph.nodes[first : last + 1])
    wanted = own | _needed(graph, own)
    return Selected(
        first=first,
        last=last,
        body=tuple(node for node in graph.own_order if node in wanted),
        received=graph.sent[first - 1] if first else (),
        sent=graph.sent[last] if last < len(graph.nodes) - 1 else (),
    )


def _needed(graph: Graph, own: set[fx.Node]) -> set[fx.Node]:
    """Of the prefix, what these nodes read, and what changes it in place."""
    needed: set[fx.Node] = set()
    prefix = set(graph.prefix)
    new = {source for node in own for source in node.all_input_nodes if source in prefix}
    while new:
        needed |= new
        storages = {value.storage for node in needed for value in graph.observed[node].values}
        new = {source for node in needed for source in node.all_input_nodes if source in prefix}
        new |= {node for node in prefix if graph.observed[node].changes & storages}
        new -= needed
    return needed


def boundaries(graph: Graph, nodes: Sequence[fx.Node]) -> tuple[Boundary, ...]:
    """What is sent of them."""
    names = dict(zip(graph.nodes, graph.names, strict=True))
    values = [(names[node], graph.observed[node].values[0]) for node in nodes]
    return tuple(Boundary(name, value.shape, value.dtype, value.requires_grad) for name, value in values)
