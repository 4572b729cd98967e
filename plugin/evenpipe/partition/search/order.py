"""In which order a model's saved storages are best computed again: most bytes a millisecond first (Capuchin's MSPS)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from evenpipe.partition.search.costs import Numbers

__all__ = ["Lists", "Order"]


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
