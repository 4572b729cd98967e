"""The storages that a model's nodes read, make and save, and the order to compute them again in (Capuchin §4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.profile import Profile

__all__ = ["Graph", "Saved"]


class Lists(NamedTuple):
    """Numbers of several things, one thing after the other: those of thing k are `flat[starts[k]:starts[k + 1]]`."""

    flat: Numbers
    starts: Numbers

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Lists:
        flat = np.array([number for numbers in lists for number in numbers], np.int64)
        return cls(flat, np.cumsum([0, *map(len, lists)], dtype=np.int64))

    def of_some(self, things: Numbers) -> tuple[Numbers, Numbers]:
        """Return the numbers of these things, and beside each number its thing's place among them."""
        begin, length = self.starts[things], self.starts[things + 1] - self.starts[things]
        upto = np.cumsum(length)
        places = np.repeat(np.arange(len(things)), length)
        return self.flat[np.arange(len(places)) + (begin - upto + length)[places]], places

    def between(self, first: int, stop: int) -> tuple[Numbers, Numbers]:
        """Return the numbers of the things `first` to `stop` − 1, and beside each number its thing."""
        things = np.repeat(np.arange(first, stop), np.diff(self.starts[first : stop + 1]))
        return self.flat[self.starts[first] : self.starts[stop]], things


class Graph:
    """A profile as lists: what each node reads and makes, and, of each storage, who makes, reads and saves it.

    changed: by storage, whether a node writes to it in place; then it is kept as it is. once: nodes that read or change
    such a storage no later than its last change, and so cannot run again from the changed one. nbytes_of, producer_of
    and last_user_of: columns of all storages; a last user of −1: no node reads it in the forward.
    """

    def __init__(self, profile: Profile) -> None:
        nodes, storages = profile.nodes, profile.storages
        self.forward_ms = [node.forward_ms for node in nodes]
        self.forward_upto = np.concatenate([[0.0], np.cumsum(self.forward_ms)])
        self.backward_upto = np.concatenate([[0.0], np.cumsum([node.backward_ms for node in nodes])])
        self.layer_ends = profile.layer_ends
        self.nbytes = [storage.nbytes for storage in storages]
        self.producer = [storage.producer for storage in storages]
        self.users = [storage.users for storage in storages]
        self.nbytes_of, self.producer_of = np.array(self.nbytes, np.int64), np.array(self.producer, np.int64)
        self.last_user_of = np.array([max(users, default=-1) for users in self.users], np.int64)
        self.changed = [bool(storage.changers) for storage in storages]
        self.once = {
            user for storage in storages for user in storage.users if user <= max(storage.changers, default=-1)
        }
        self.is_saved = [bool(storage.savers) for storage in storages]
        self.makes = _by_node(len(nodes), [(one,) * (one >= 0) for one in self.producer])
        self.reads = _by_node(
            len(nodes), [[user for user in storage.users if user != storage.producer] for storage in storages]
        )
        self._savers = Lists.of(_by_node(len(nodes), [storage.savers for storage in storages]))
        self._users = Lists.of(_by_node(len(nodes), self.users))

    @cached_property
    def order(self) -> Order:
        """The order in which storages are dropped, worked out once for all ranges."""
        return Order(self)

    def chain(self, storage: int, is_there: Callable[[int], bool]) -> tuple[list[int], list[int]]:
        """Return the nodes that run again for a storage, and the storages that they read and that are there."""
        nodes, ends, open_nodes = dict[int, None](), dict[int, None](), [self.producer[storage]]
        while open_nodes:
            node = open_nodes.pop()
            if node not in nodes:
                nodes[node] = None
                for read in self.reads[node]:
                    if is_there(read):
                        ends[read] = None
                    else:
                        open_nodes.append(self.producer[read])
        return list(nodes), list(ends)

    def saved(self, start: int, stop: int) -> Saved:
        """Return the storages that the nodes from `start` to `stop` − 1 save."""
        storages, nodes = self._savers.between(start, stop)
        ids, first = np.unique(storages, return_index=True)
        last = len(storages) - 1 - np.unique(storages[::-1], return_index=True)[1]
        used, used_at = self._users.between(start, stop)
        last_use = np.maximum(start, self.producer_of[ids])
        place = np.searchsorted(ids, used)
        known = place < len(ids)
        known[known] = ids[place[known]] == used[known]
        np.maximum.at(last_use, place[known], used_at[known])
        return Saved(self, start, stop, ids, self.nbytes_of[ids], nodes[first], nodes[last], last_use)


def _by_node(count: int, nodes_of: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each node, the storages that have it among theirs, ascending."""
    by_node: list[list[int]] = [[] for _ in range(count)]
    for storage, nodes in enumerate(nodes_of):
        for node in nodes:
            by_node[node].append(storage)
    return by_node


class Order:
    """The order in which a model's saved storages are best computed again: most bytes a millisecond first (MSPS).

    Each is computed from what its chain of nodes reads, where all others that are ever saved are kept. nodes: of each
    storage's chain, the first of them `first_node`; run_for: the storages of each node's chains. ends: the saved
    storages and the inputs that a chain reads. A node of several dropped storages runs again once: where a chain would
    end at a storage that is dropped too, that one's nodes run anyway. ms_a_byte: what a storage added when it was
    picked, after each pick weighed again for those that have nodes in common with it, but no less than the pick before.

    The order is worked out once for a model: such nodes are close to each other, and in a range of nodes the same picks
    come in the same order, except for chains that begin before the range.
    """

    def __init__(self, graph: Graph) -> None:
        nbytes, forward_ms = graph.nbytes, graph.forward_ms
        stays, is_saved = np.array(graph.changed, bool) | (graph.producer_of < 0), np.array(graph.is_saved, bool)
        there = (stays | is_saved).tolist()
        chains: list[tuple[list[int], list[int]]] = [([], []) for _ in nbytes]
        for storage in np.flatnonzero(is_saved & ~stays).tolist():
            chain = graph.chain(storage, there.__getitem__)
            chains[storage] = chain if graph.once.isdisjoint(chain[0]) else ([], [])
        nodes = [sorted(nodes) for nodes, _ in chains]
        self.nodes, self.ends = Lists.of(nodes), Lists.of([sorted(ends) for _, ends in chains])
        self.first_node: Numbers = np.array([min(chain, default=-1) for chain in nodes], np.int64)
        self.run_for = _by_node(len(forward_ms), nodes)
        self.ms_a_byte: Numbers = np.full(len(nbytes), np.inf)
        adds_ms = [sum(forward_ms[node] for node in chain) for chain in nodes]
        heap = [
            (adds_ms[storage] / nbytes[storage], storage)
            for storage, _ in enumerate(nodes)
            if nodes[storage] and nbytes[storage]
        ]
        heapify(heap)
        runs, least = [False] * len(forward_ms), 0.0
        while heap:
            ms_a_byte, storage = heappop(heap)
            if np.isfinite(self.ms_a_byte[storage]) or ms_a_byte > adds_ms[storage] / nbytes[storage]:
                continue  # picked before, or weighed again since
            least = self.ms_a_byte[storage] = max(least, ms_a_byte)
            for node in nodes[storage]:
                if not runs[node]:
                    runs[node] = True
                    for other in self.run_for[node]:
                        adds_ms[other] -= forward_ms[node]
                        if other != storage and nbytes[other]:
                            heappush(heap, (adds_ms[other] / nbytes[other], other))


@dataclass(eq=False)
class Saved:
    """The storages that the nodes from `start` to `stop` − 1 save, ascending, as columns.

    first_saver, last_saver: of these nodes, the first and the last whose backward needs it; the last one's comes first.
    last_use: the last node that reads it in the forward.
    """

    graph: Graph
    start: int
    stop: int
    ids: Numbers
    nbytes: Numbers
    first_saver: Numbers
    last_saver: Numbers
    last_use: Numbers

    @cached_property
    def total(self) -> int:
        return int(self.nbytes.sum())

    @cached_property
    def last_savers(self) -> list[int]:
        return list(self.last_saver.tolist())

    @cached_property
    def producers(self) -> Numbers:
        return self.graph.producer_of.take(self.ids)

    @cached_property
    def changed(self) -> Numbers:
        """Which of them a node writes to in place."""
        return np.array(self.graph.changed, bool)[self.ids]

    @cached_property
    def places(self) -> dict[int, int]:
        """The place of each storage."""
        return {storage: place for place, storage in enumerate(self.ids.tolist())}

    @cached_property
    def is_here(self) -> Numbers:
        """For each storage of the model, whether it is among them."""
        is_here = np.zeros(len(self.graph.nbytes), bool)
        is_here[self.ids] = True
        return is_here

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
        """When the last node to read each has ended, since the forward's start."""
        upto = self.graph.forward_upto
        ms: Numbers = upto[self.last_use + 1] - upto[self.start]
        return ms

    @cached_property
    def needed_ms(self) -> Numbers:
        """When the first backward that needs each starts, since the backward's start, where nothing runs again."""
        return self.backward_ms_of(self.last_saver)

    def backward_ms_of(self, nodes: Numbers) -> Numbers:
        """Return when these nodes' backwards start, since the backward's start."""
        upto = self.graph.backward_upto
        ms: Numbers = upto[self.stop] - upto[nodes + 1]
        return ms

    def backward_node(self, at_ms: Numbers) -> Numbers:
        """Return the node whose backward runs so long after the backward's start; the last one at or before it."""
        upto = self.graph.backward_upto
        running = np.searchsorted(upto, upto[self.stop] - np.maximum(at_ms, 0.0), "left") - 1
        nodes: Numbers = np.clip(running, self.start, self.stop - 1)
        return nodes

    def backward_peak(self, until: Numbers) -> int:
        """Return the most bytes that the micro-batch holds in its backward.

        A storage is held from the backward of node `until` to its first saver's; `until` is the range's last node for
        storages that were kept all along.
        """
        if not len(self.ids):
            return 0
        length = self.stop - self.start
        there = np.bincount(self.first_saver - self.start, self.nbytes, length + 1)
        gone = np.bincount(until + 1 - self.start, self.nbytes, length + 1)
        return int(np.cumsum(there - gone)[:-1].max())
