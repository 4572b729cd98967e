"""What a stage's nodes save, from where it can be had again, and when it is last and first used (Capuchin §4)."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from evenpipe.partition.profile import Profile
from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.order import Order

__all__ = ["Columns", "Graph", "Saved"]


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
