"""After which nodes a stage may end, and what the next one then receives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from evenpipe.partition.trace.observing import Observed
from evenpipe.partition.trace.ordering import Unit

__all__ = ["allowed_cuts", "crossings"]


def crossings(order: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """After each node, the nodes so far whose results are still needed: what a cut there sends.

    What skips over stages is handed on by each of them, so it crosses every cut in between.
    """
    place = {node: number for number, node in enumerate(order)}
    last = {node: max((place[user] for user in node.users if user in place), default=-1) for node in order}
    live: list[fx.Node] = []
    result = []
    for number, node in enumerate(order):
        live = [other for other in [*live, node] if last[other] > number]
        result.append(tuple(live))
    return result


def allowed_cuts(
    units: Sequence[Unit],
    sent: Sequence[tuple[fx.Node, ...]],
    seen: Mapping[fx.Node, Observed],
    resident: Collection[int],
) -> list[bool]:
    """For each node, whether a stage may end with it; the last ends no stage but the last.

    What is sent is received as copies. So every tensor sent has memory of its own: of two views of one storage a
    change in place would reach one only, and a view of a parameter (`resident` storages) is no message. Nor is there
    a cut between the first use of a tensor and the last change to it in place. Where nothing that is sent carries a
    gradient, as behind frozen layers, the stages before have no backward.
    """
    order = [node for unit in units for node in unit]
    allowed = [node is unit[-1] for unit in units for node in unit]
    allowed[-1] = False
    first: dict[int, int] = {}
    for number, node in enumerate(order):
        it = seen[node]
        for storage in it.reads | {value.storage for value in it.values}:
            first.setdefault(storage, number)
        for storage in it.changes:
            allowed[first[storage] : number] = [False] * (number - first[storage])
    for number, nodes in enumerate(sent):
        values = [value for node in nodes for value in seen[node].values]
        storages = [value.storage for value in values]
        allowed[number] = (
            allowed[number]
            and all(seen[node].tensor for node in nodes)
            and bool(values)
            and len(set(storages)) == len(storages)
            and not any(storage in resident for storage in storages)
        )
    return allowed
