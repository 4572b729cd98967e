"""From what a part of a plan recomputes and swaps, storage by storage, to what its forward does at which node."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import fx

from evenpipe.partition.costs.storages import Graph as Ranges
from evenpipe.partition.dawnpiper.capuchin import queued
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.plan import Stage
from evenpipe.partition.trace import Graph, PartNodes
from evenpipe.runtime.recompute_swap import Keeping
from evenpipe.stage_code.part import StageCodeError

__all__ = ["Kept", "keeping_of", "kept"]

_ByNode = dict[int, tuple[int, ...]]


class Kept(NamedTuple):
    """The calls of a part's code through `keep`: nodes by their numbers, received values by their storages'."""

    keeping: Keeping
    nodes: Mapping[fx.Node, int]
    given: Mapping[fx.Node, int]


def kept(graph: Graph, profile: Profile, part: Stage, host_gbps: float, selected: PartNodes) -> Kept:
    """Return the calls through `keep` of one part of a plan of this graph and profile."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    own = [node for node in selected.body if node in numbers]
    ordinals = {numbers[node]: node.meta["ordinal"] for node in own if "ordinal" in node.meta}
    storages = {node: _storage_of(graph, profile, numbers, node) for node in selected.received}
    given = {node: number for node, number in storages.items() if number in part.swap_storages}
    unknown = [graph.names[numbers[node]] for node, number in storages.items() if number < 0]
    _check_given(profile, part, set(given.values()), unknown)
    relayed = frozenset(number for node, number in given.items() if node in selected.sent)
    order = [numbers[node] for node in own]
    keeping = keeping_of(profile, part, host_gbps, order, ordinals, given.values(), relayed)
    return Kept(keeping, {node: numbers[node] for node in own if numbers[node] in keeping.nodes}, given)


def _check_given(profile: Profile, part: Stage, given: Set[int], unknown: Sequence[str]) -> None:
    """Raise StageCodeError where the plan swaps something that the part is not given."""
    received = {number for number in part.swap_storages if profile.storages[number].producer < part.first_node}
    if missing := sorted(received - given):
        made_by = profile.nodes[profile.storages[missing[0]].producer].name
        among = f" (of {', '.join(unknown)} it cannot be told)" if unknown else ""
        raise StageCodeError(
            f"stage {part.stage} is to swap what {made_by} makes on another one, and which is none of the tensors that "
            f"it receives{among}: make a plan with --optimize recompute"
        )


def _storage_of(graph: Graph, profile: Profile, numbers: Mapping[fx.Node, int], node: fx.Node) -> int:
    """Return the profile's number of the storage that a node's result lies in; -1 where that cannot be told.

    The first node that returns something in it allocates it; among what that node allocates, its readers tell it.
    """
    storage = graph.observed[node].values[0].storage
    maker = next(other for other in graph.nodes if storage in graph.observed[other].returns)
    readers = {numbers[other] for other in graph.nodes if other is not maker and storage in graph.observed[other].reads}
    # Taking one of several results out reads nothing.
    takes = {number for number, other in enumerate(graph.nodes) if other.target is operator.getitem}
    candidates = [
        number
        for number, allocated in enumerate(profile.storages)
        if allocated.producer == numbers[maker] and readers == set(allocated.users) - takes
    ]
    return candidates[0] if len(candidates) == 1 else -1


def keeping_of(
    profile: Profile,
    part: Stage,
    host_gbps: float,
    order: Sequence[int],
    ordinals: Mapping[int, int],
    given: Collection[int] = (),
    relayed: Set[int] = frozenset(),
) -> Keeping:
    """Return what the part of a plan on this profile does in every micro-batch's forward.

    `host_gbps`: the plan's. `order`: of the part's nodes, as they are run. `ordinals`: of random nodes, by which they
    draw the same numbers when they run again. `given`: storages that the part receives, and swaps; of these `relayed`
    are sent on, and so have to be back before the backward starts with what was sent.
    """
    ranges = Ranges(profile)
    names = {node.name: number for number, node in enumerate(profile.nodes)}
    again = frozenset(names[name] for name in part.recompute)
    dropped = _passed_on(profile, again, frozenset(order)).union(part.drop_storages)
    swapped = [number for number in part.swap_storages if ranges.producer[number] >= part.first_node or number in given]
    makers = {ranges.producer[number] for number in dropped.union(swapped)}.intersection(order)
    out, gone, back, early = _Moves(profile, ranges, swapped, order, host_gbps).at_nodes(again, part.drop_storages)
    back = {node: left for node, numbers in back.items() if (left := tuple(n for n in numbers if n not in relayed))}
    early += tuple(number for number in sorted(relayed) if number not in early)
    return Keeping(
        again=again,
        dropped=dropped,
        swapped=frozenset(swapped),
        made={node: tuple((number, ranges.nbytes[number]) for number in ranges.makes[node]) for node in sorted(makers)},
        ordinals={node: ordinals[node] for node in sorted(again) if node in ordinals},
        out=out,
        gone=gone,
        back=back,
        early=early,
    )


def _passed_on(profile: Profile, again: frozenset[int], part: frozenset[int]) -> frozenset[int]:
    """Return what nodes that run again make for others that do, and that no backward of the part needs."""
    return frozenset(
        number
        for number, storage in enumerate(profile.storages)
        if storage.producer in again
        and part.isdisjoint(storage.savers)
        and not again.isdisjoint(storage.users)
        and not storage.changers
    )


class _Moves:
    """When swapped storages leave and come back, as `dawnpiper.capuchin` weighs it, in the order of execution."""

    def __init__(
        self, profile: Profile, ranges: Ranges, numbers: Sequence[int], order: Sequence[int], host_gbps: float
    ) -> None:
        self._ranges, self._numbers, self._order = ranges, numbers, order
        self._place = {node: place for place, node in enumerate(order)}
        self._storages = profile.storages
        self._forward, self._backward = (
            np.concatenate([[0.0], np.cumsum([getattr(profile.nodes[node], name) for node in order])])
            for name in ("forward_ms", "backward_ms")
        )
        self._ms_a_byte = 1 / (host_gbps * 1e6) if host_gbps else 0.0

    def at_nodes(self, again: Set[int], drop: Collection[int]) -> tuple[_ByNode, _ByNode, _ByNode, tuple[int, ...]]:
        """Return `out`, `gone`, `back` and `early` of a `Keeping`."""
        numbers = self._numbers
        forward, backward = self._forward, self._backward
        takes = np.array([self._ranges.nbytes[number] * self._ms_a_byte for number in numbers])
        used = np.array([self._last((self._storages[n].producer, *self._storages[n].users)) for n in numbers], np.int64)
        rerun = self._needed_again(again, frozenset(drop))
        saver = np.array([max(self._last(self._storages[n].savers), rerun.get(n, 0)) for n in numbers], np.int64)
        free, needed = forward[used + 1], backward[-1] - backward[saver + 1]
        left_ms, back_ms = queued(free, takes), -queued(-needed, takes)
        left = np.maximum(np.searchsorted(forward, left_ms, "left") - 1, used)
        starts = np.searchsorted(backward, backward[-1] - np.maximum(back_ms, 0.0), "left") - 1
        starts = np.clip(starts, saver, len(self._order) - 1)
        out, gone, back = (defaultdict[int, list[int]](list) for _ in range(3))
        for at in np.argsort(free, kind="stable").tolist():
            out[self._order[used[at]]].append(numbers[at])
            if left_ms[at] <= forward[-1]:
                gone[self._order[min(left[at], len(self._order) - 1)]].append(numbers[at])
        early = []
        for at in np.argsort(needed, kind="stable").tolist():
            if back_ms[at] < 0:
                early.append(numbers[at])
            else:
                back[self._order[starts[at]]].append(numbers[at])
        return _settled(out), _settled(gone), _settled(back), tuple(early)

    def _last(self, nodes: Sequence[int]) -> int:
        """Return the place of the last of these nodes that the part runs; the first place where it runs none."""
        return max((self._place[node] for node in nodes if node in self._place), default=0)

    def _needed_again(self, again: Set[int], dropped: Set[int]) -> dict[int, int]:
        """Return, by storage, from which place's backward on a node that runs again reads it.

        A node runs again when the first backward needs what it makes, or a node that reads it runs again.
        """
        graph = self._ranges
        runs, read_at = dict[int, int](), dict[int, int]()
        for node in sorted(again, key=self._place.__getitem__, reverse=True):
            needed = (self._last(self._storages[number].savers) for number in graph.makes[node] if number in dropped)
            users = (runs[user] for number in graph.makes[node] for user in graph.users[number] if user in runs)
            runs[node] = at = max(chain(needed, users), default=0)
            for number in graph.reads[node]:
                read_at[number] = max(read_at.get(number, 0), at)
        return read_at


def _settled(by_node: Mapping[int, list[int]]) -> _ByNode:
    return {node: tuple(numbers) for node, numbers in by_node.items()}
