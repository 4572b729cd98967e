"""What a stage's nodes save, from where it can be had again, and when it is last and first used (Capuchin §4)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from evenpipe.partition.profile import Profile
from evenpipe.partition.search.costs import Numbers

__all__ = ["Alone", "Graph", "Saved"]


class Alone(NamedTuple):
    """What it takes to have one storage again where all others that are ever saved are kept.

    nodes: which run again, in `ms`, from `first_node` on. ends: the saved storages and the inputs that they read.
    """

    ms: float
    first_node: int
    nodes: frozenset[int]
    ends: frozenset[int]


class Graph:
    """A profile as lists: what each node reads and allocates, and every saver and user with its storage, by node."""

    def __init__(self, profile: Profile) -> None:
        self.forward_ms = [node.forward_ms for node in profile.nodes]
        self.forward_upto = np.concatenate([[0.0], np.cumsum(self.forward_ms)])
        self.backward_upto = np.concatenate([[0.0], np.cumsum([node.backward_ms for node in profile.nodes])])
        self.nbytes = [one.nbytes for one in profile.storages]
        self.producer = [one.producer for one in profile.storages]
        self.users = [one.users for one in profile.storages]
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
    def alone(self) -> dict[int, Alone]:
        """Of every saved storage that a node makes."""
        return {one: self._alone(one) for one, saved in enumerate(self.is_saved) if saved and self.producer[one] >= 0}

    def _alone(self, storage: int) -> Alone:
        nodes, ends, open_nodes = set[int](), set[int](), [self.producer[storage]]
        ms = 0.0
        while open_nodes:
            node = open_nodes.pop()
            if node not in nodes:
                nodes.add(node)
                ms += self.forward_ms[node]
                for read in self.reads[node]:
                    if self.is_saved[read] or self.producer[read] < 0:
                        ends.add(read)
                    else:
                        open_nodes.append(self.producer[read])
        return Alone(ms, min(nodes), frozenset(nodes), frozenset(ends))

    @cached_property
    def runs_for(self) -> list[list[int]]:
        """By node, the storages that are had again by running it, among others."""
        return _turned(len(self.makes), ((one, alone.nodes) for one, alone in self.alone.items()))

    @cached_property
    def ended_by(self) -> list[list[int]]:
        """By storage, those of which it is one of the ends."""
        return _turned(len(self.nbytes), ((one, alone.ends) for one, alone in self.alone.items()))

    def saved(self, start: int, stop: int) -> Saved:
        """Of the nodes from `start` to `stop` − 1."""
        nodes, storages = _within(self._savers, start, stop)
        ids, first = np.unique(storages, return_index=True)
        last = len(storages) - 1 - np.unique(storages[::-1], return_index=True)[1]
        used_at, used = _within(self._last_users, start, stop)
        last_use = np.array([max(start, self.producer[one]) for one in ids.tolist()], np.int64)
        place = np.searchsorted(ids, used)
        known = place < len(ids)
        known[known] = ids[place[known]] == used[known]
        np.maximum.at(last_use, place[known], used_at[known])
        weights = np.array([self.nbytes[one] for one in ids.tolist()], np.int64)
        return Saved(self, start, stop, ids, weights, nodes[first], nodes[last], last_use)


def _turned(count: int, having: Iterable[tuple[int, Iterable[int]]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for one, others in having:
        for other in others:
            found[other].append(one)
    return found


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
        """Since the backward's start: when the first that needs it starts."""
        upto = self.graph.backward_upto
        found: Numbers = upto[self.stop] - upto[self.last_saver + 1]
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
