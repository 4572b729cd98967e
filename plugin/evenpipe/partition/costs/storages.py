"""What a stage's nodes save, from where it can be had again, and when it is last and first used (Capuchin §4)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.profile import Profile

__all__ = ["Columns", "Graph", "Lists", "Order", "Saved"]


class Lists(NamedTuple):
    """Numbers of several things, one thing after the other: those of thing k are `flat[starts[k]:starts[k + 1]]`."""

    flat: Numbers
    starts: Numbers

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Lists:
        lengths = np.array([len(one) for one in lists], np.int64)
        flat = np.array([number for one in lists for number in one], np.int64)
        return cls(flat, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))

    def of_some(self, things: Numbers) -> tuple[Numbers, Numbers]:
        """The numbers of these, and beside each one its thing's place among them."""
        begin, length = self.starts[things], self.starts[things + 1] - self.starts[things]
        upto = np.cumsum(length)
        places = np.repeat(np.arange(len(things)), length)
        return self.flat[np.arange(len(places)) + (begin - upto + length)[places]], places


class Order:
    """What it takes to have each storage again where all others that are ever saved are kept; and the order of picks.

    nodes: those that run again for a storage, the first of them `first_node`. ends: the saved storages and the inputs
    that they read. Of dropped ones the nodes of each run again, once: where the chain of one would end at another that
    is dropped too, that one's nodes run anyway. ms_a_byte: of each storage, what it added when it was picked, after
    each pick weighed again for those that have nodes in common with it, but no less than what was picked before.

    So the order is found once for a model: such nodes are close to each other, and of a range of nodes the same picks
    come in the same order, but for what begins before the range.
    """

    def __init__(
        self,
        forward_ms: Sequence[float],
        reads: Sequence[Sequence[int]],
        nbytes: Sequence[int],
        producer: Sequence[int],
        is_end: Sequence[bool],
        goes: Sequence[bool],
        once: Set[int],
    ) -> None:
        """`goes`: which storages are dropped at all; `is_end`: which are there; `once`: nodes that never run again."""
        count = len(nbytes)
        nodes, ends = list[list[int]](), list[list[int]]()
        for storage in range(count):
            chain = (list[int](), list[int]())
            if goes[storage] and producer[storage] >= 0:
                chain = _chain(storage, reads, producer, is_end)
                if not once.isdisjoint(chain[0]):
                    chain = [], []
            nodes.append(chain[0])
            ends.append(chain[1])
        self.nodes, self.ends = Lists.of(nodes), Lists.of(ends)
        self.first_node: Numbers = np.array([min(one, default=-1) for one in nodes], np.int64)
        self.run_for: list[list[int]] = [[] for _ in forward_ms]
        for storage, mine in enumerate(nodes):
            for node in mine:
                self.run_for[node].append(storage)
        self.ms_a_byte: Numbers = np.full(count, np.inf)
        adds_ms = [sum(forward_ms[node] for node in mine) for mine in nodes]
        heap = [(adds_ms[one] / nbytes[one], one) for one, mine in enumerate(nodes) if mine and nbytes[one]]
        heapify(heap)
        runs, least = [False] * len(forward_ms), 0.0
        while heap:
            dear, storage = heappop(heap)
            if np.isfinite(self.ms_a_byte[storage]) or dear > adds_ms[storage] / nbytes[storage]:
                continue  # picked before, or weighed again since
            least = self.ms_a_byte[storage] = max(least, dear)
            for node in nodes[storage]:
                if not runs[node]:
                    runs[node] = True
                    for other in self.run_for[node]:
                        adds_ms[other] -= forward_ms[node]
                        if other != storage and nbytes[other]:
                            heappush(heap, (adds_ms[other] / nbytes[other], other))


def _chain(
    storage: int, reads: Sequence[Sequence[int]], producer: Sequence[int], is_end: Sequence[bool]
) -> tuple[list[int], list[int]]:
    nodes, ends, open_nodes = set[int](), set[int](), [producer[storage]]
    while open_nodes:
        node = open_nodes.pop()
        if node not in nodes:
            nodes.add(node)
            for read in reads[node]:
                if is_end[read] or producer[read] < 0:
                    ends.add(read)
                else:
                    open_nodes.append(producer[read])
    return sorted(nodes), sorted(ends)


class Columns(NamedTuple):
    """Of all storages: bytes, the node that makes it, and the last that reads it in the forward; −1: none does."""

    nbytes: Numbers
    producer: Numbers
    last_user: Numbers


class Graph:
    """A profile as lists: what each node reads and allocates, and every saver and user with its storage, by node.

    changed: by storage, whether a node writes to it in place; then it is kept as it is. once: nodes that read or change
    such a one no later than its last change, and so cannot run again from what it has become.
    """

    def __init__(self, profile: Profile) -> None:
        self.forward_ms = [node.forward_ms for node in profile.nodes]
        self.forward_upto = np.concatenate([[0.0], np.cumsum(self.forward_ms)])
        self.backward_upto = np.concatenate([[0.0], np.cumsum([node.backward_ms for node in profile.nodes])])
        self.layer_ends = profile.layer_ends
        self.nbytes = [one.nbytes for one in profile.storages]
        self.producer = [one.producer for one in profile.storages]
        self.users = [one.users for one in profile.storages]
        self.changed = [bool(one.changers) for one in profile.storages]
        self.once = {user for one in profile.storages for user in one.users if user <= max(one.changers, default=-1)}
        self.is_saved = [bool(one.savers) for one in profile.storages]
        self.reads: list[list[int]] = [[] for _ in profile.nodes]
        self.makes: list[list[int]] = [[] for _ in profile.nodes]
        for number, one in enumerate(profile.storages):
            if one.producer >= 0:
                self.makes[one.producer].append(number)
            for user in one.users:
                if user != one.producer:
                    self.reads[user].append(number)
        self._savers = _by_node([one.savers for one in profile.storages])
        self._last_users = _by_node([one.users for one in profile.storages])

    @cached_property
    def order(self) -> Order:
        """What having each saved storage again takes, found once for all ranges."""
        is_end = [saved or changed for saved, changed in zip(self.is_saved, self.changed, strict=True)]
        goes = [saved and not changed for saved, changed in zip(self.is_saved, self.changed, strict=True)]
        return Order(self.forward_ms, self.reads, self.nbytes, self.producer, is_end, goes, self.once)

    @cached_property
    def columns(self) -> Columns:
        return Columns(
            np.array(self.nbytes, np.int64),
            np.array(self.producer, np.int64),
            np.array([max(one, default=-1) for one in self.users], np.int64),
        )

    def saved(self, start: int, stop: int) -> Saved:
        """Of the nodes from `start` to `stop` − 1."""
        nodes, storages = _within(self._savers, start, stop)
        ids, first = np.unique(storages, return_index=True)
        last = len(storages) - 1 - np.unique(storages[::-1], return_index=True)[1]
        used_at, used = _within(self._last_users, start, stop)
        last_use = np.maximum(start, self.columns.producer[ids])
        place = np.searchsorted(ids, used)
        known = place < len(ids)
        known[known] = ids[place[known]] == used[known]
        np.maximum.at(last_use, place[known], used_at[known])
        return Saved(self, start, stop, ids, self.columns.nbytes[ids], nodes[first], nodes[last], last_use)


def _by_node(touched: list[tuple[int, ...]]) -> tuple[Numbers, Numbers]:
    nodes = np.array([node for one in touched for node in one], np.int64)
    storages = np.repeat(np.arange(len(touched)), [len(one) for one in touched])
    order = np.argsort(nodes, kind="stable")
    return nodes[order], storages[order]


def _within(pairs: tuple[Numbers, Numbers], start: int, stop: int) -> tuple[Numbers, Numbers]:
    there = slice(*np.searchsorted(pairs[0], [start, stop]))
    return pairs[0][there], pairs[1][there]


class Saved:
    """The storages that the nodes from `start` to `stop` − 1 save, ascending, as columns.

    first_saver, last_saver: the nodes, of these, whose backward needs it; the last one's comes first. last_use: the
    node that is the last to read it in the forward.
    """

    def __init__(
        self,
        graph: Graph,
        start: int,
        stop: int,
        ids: Numbers,
        nbytes: Numbers,
        first_saver: Numbers,
        last_saver: Numbers,
        last_use: Numbers,
    ) -> None:
        self.graph, self.start, self.stop = graph, start, stop
        self.ids, self.nbytes = ids, nbytes
        self.first_saver, self.last_saver, self.last_use = first_saver, last_saver, last_use

    @cached_property
    def total(self) -> int:
        return int(self.nbytes.sum())

    @cached_property
    def last_savers(self) -> list[int]:
        return list(self.last_saver.tolist())

    @cached_property
    def producers(self) -> Numbers:
        found: Numbers = self.graph.columns.producer[self.ids]
        return found

    @cached_property
    def changed(self) -> Numbers:
        """Which a node writes to in place."""
        return np.array(self.graph.changed, bool)[self.ids]

    @cached_property
    def places(self) -> dict[int, int]:
        """The place of each storage."""
        return {storage: place for place, storage in enumerate(self.ids.tolist())}

    @cached_property
    def is_here(self) -> Numbers:
        """Of all storages of the model, whether it is among them."""
        found = np.zeros(len(self.graph.nbytes), bool)
        found[self.ids] = True
        return found

    @property
    def forward_ms(self) -> float:
        upto = self.graph.forward_upto
        return float(upto[self.stop] - upto[self.start])

    @property
    def backward_ms(self) -> float:
        upto = self.graph.backward_upto
        return float(upto[self.stop] - upto[self.start])

    @cached_property
    def free_from_ms(self) -> Numbers:
        """Since the forward's start: when the last to read it has ended."""
        upto = self.graph.forward_upto
        found: Numbers = upto[self.last_use + 1] - upto[self.start]
        return found

    @cached_property
    def needed_ms(self) -> Numbers:
        """Since the backward's start: when the first that needs it starts, where nothing runs again."""
        return self.backward_ms_of(self.last_saver)

    def backward_ms_of(self, nodes: Numbers) -> Numbers:
        """Since the backward's start: when those of these nodes start."""
        upto = self.graph.backward_upto
        found: Numbers = upto[self.stop] - upto[nodes + 1]
        return found

    def backward_node(self, at_ms: Numbers) -> Numbers:
        """The node whose backward runs so long after the backward's start; the last one at its start or before."""
        upto = self.graph.backward_upto
        found = np.searchsorted(upto, upto[self.stop] - np.maximum(at_ms, 0.0), "left") - 1
        nodes: Numbers = np.clip(found, self.start, self.stop - 1)
        return nodes

    def backward_peak(self, until: Numbers) -> int:
        """The most bytes that the micro-batch holds in its backward.

        A storage is held from the backward of node `until`, which is the range's last for what was kept all along, to
        that of its first saver.
        """
        if not len(self.ids):
            return 0
        length = self.stop - self.start
        there = np.bincount(self.first_saver - self.start, self.nbytes, length + 1)
        gone = np.bincount(until + 1 - self.start, self.nbytes, length + 1)
        return int(np.cumsum(there - gone)[:-1].max())
