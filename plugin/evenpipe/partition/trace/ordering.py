"""Which nodes every stage computes for itself, the order of the others, and after which a stage may end (B.1)."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

from torch import fx, nn

from evenpipe.partition.trace.observing import Observed

__all__ = ["Unit", "allowed_cuts", "crossings", "ordered", "prefix_of"]

Unit = tuple[fx.Node, ...]


def prefix_of(nodes: Sequence[fx.Node], observed: Mapping[fx.Node, Observed], module: nn.Module) -> set[fx.Node]:
    """Return masks, position ids and the like: what inputs alone determine, and no gradient passes.

    Stages compute them anew instead of sending them. So they read no parameter, draw no random number and change
    nothing that a node outside reads.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    forbidden: frozenset[int] = frozenset()  # storages that a node outside changes
    while True:
        prefix: set[fx.Node] = set()
        fresh: set[int] = set()
        for node in nodes:
            if node.op == "placeholder" or (node.op == "get_attr" and node.target not in parameters):
                prefix.add(node)
            elif node.op == "call_function" and prefix.issuperset(node.all_input_nodes):
                behaviour = observed[node]
                touched = behaviour.returns | behaviour.reads
                gradient = any(value.requires_grad for value in behaviour.values)
                if behaviour.changes <= fresh and not (behaviour.random or gradient or touched & forbidden):
                    prefix.add(node)
                    fresh.update(behaviour.returns - behaviour.reads)
        outside = [node for node in nodes if node.op == "call_function" and node not in prefix]
        changed = frozenset[int]().union(*(observed[node].changes for node in outside))
        if changed <= forbidden:
            return prefix
        forbidden |= changed


def ordered(nodes: Sequence[fx.Node], observed: Mapping[fx.Node, Observed]) -> list[Unit]:
    """Return the nodes in units that stay together, by depth, then by the start of their forward.

    Depth is counted from the loss: the longest way to it is first. Counted from the inputs, as deep as an operation can
    be early, every decoder layer of T5 would have its cross-attention's keys and values right behind the encoder, and
    each cut would send 48 of them (t5-large, micro-batch 4: the median cut 128 MiB instead of 40).

    A unit is an operation with the `getitem`s of its results, and before it what only has a side effect (batch norm's
    counter). An operation that changes a tensor in place comes after all that read it before and before all that read
    it later.
    """
    units = _units(nodes)
    unit_of = {node: number for number, unit in enumerate(units) for node in unit}
    before: list[set[int]] = [set() for _ in units]
    touched: dict[int, list[int]] = {}
    changed: dict[int, int] = {}
    for node in nodes:
        number = unit_of[node]
        before[number].update(unit_of[source] for source in node.all_input_nodes if source in unit_of)
        if node.target is operator.getitem:
            continue
        behaviour = observed[node]
        for storage in behaviour.reads | behaviour.returns:
            if storage in behaviour.changes:
                before[number].update(touched.get(storage, ()))
                changed[storage] = number
            elif storage in changed:
                before[number].add(changed[storage])
            touched.setdefault(storage, []).append(number)
    height = [0] * len(units)
    for number in reversed(range(len(units))):
        for other in before[number] - {number}:
            height[other] = max(height[other], height[number] + 1)
    return [units[number] for number in sorted(range(len(units)), key=lambda number: (-height[number], number))]


def _units(nodes: Sequence[fx.Node]) -> list[Unit]:
    units: list[list[fx.Node]] = []
    unit_of: dict[fx.Node, list[fx.Node]] = {}
    effects: list[fx.Node] = []
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in unit_of:
            unit = unit_of[node.args[0]]  # type: ignore[index]
            unit.append(node)
        elif not node.users:
            effects.append(node)
            continue
        else:
            unit = [*effects, node]
            units.append(unit)
            effects = []
        unit_of.update((member, unit) for member in unit)
    if units:
        units[-1].extend(effects)
    return [tuple(unit) for unit in units]


def crossings(order: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """Return, for each node, the nodes so far whose results are still needed: a cut there sends them.

    A value that skips over stages is handed on by each of them, so it crosses every cut in between.
    """
    place = {node: number for number, node in enumerate(order)}
    last = {node: max((place[user] for user in node.users if user in place), default=-1) for node in order}
    live: list[fx.Node] = []
    crossing = []
    for number, node in enumerate(order):
        live = [other for other in [*live, node] if last[other] > number]
        crossing.append(tuple(live))
    return crossing


def allowed_cuts(
    units: Sequence[Unit],
    sent: Sequence[tuple[fx.Node, ...]],
    observed: Mapping[fx.Node, Observed],
    resident: Collection[int],
) -> list[bool]:
    """Return, for each node, whether a stage may end with it; the last ends no stage but the last.

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
        behaviour = observed[node]
        for storage in behaviour.reads | behaviour.returns:
            first.setdefault(storage, number)
        for storage in behaviour.changes:
            allowed[first[storage] : number] = [False] * (number - first[storage])
    for number, nodes in enumerate(sent):
        storages = [value.storage for node in nodes for value in observed[node].values]
        tensors = all(observed[node].tensor for node in nodes)
        apart = len(set(storages)) == len(storages) and not any(storage in resident for storage in storages)
        allowed[number] = allowed[number] and tensors and bool(storages) and apart
    return allowed
