"""What it takes to compute dropped storages again from what is kept: savings do not add up, some cost memory."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.ranges import Saved

__all__ = ["Chain", "Recomputation"]


class Chain(NamedTuple):
    """What dropping one more storage adds: nodes that run again, in so many ms, and storages that must be kept then.

    saves: bytes, less those of storages that an earlier stage sent, and of checkpoints, that are kept for this alone.
    """

    ms: float
    saves: int
    nodes: set[int]
    received: set[int]


class Recomputation:
    """Storages that one part of the model drops after its forward. Each node that it takes runs again once.

    A storage is had again from what its producer reads: from what is kept or comes back from the host, else from what
    is computed again in turn. What an earlier stage sent cannot be computed here, so it is kept, as are `checkpoints`
    and what each stage has of the inputs, as a mask. Parameters are there. Random nodes draw the same numbers again.
    """

    def __init__(self, saved: Saved, checkpoints: frozenset[int] = frozenset()) -> None:
        self._saved, self._graph = saved, saved.graph
        self.checkpoints = checkpoints
        #: The place in `saved` of each storage.
        self.places = {storage: place for place, storage in enumerate(saved.ids.tolist())}
        self.dropped = set[int]()
        self.nodes = set[int]()
        self.received = set[int]()
        self.ms = 0.0
        self._ends_at, self._runs = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)

    @property
    def dropped_bytes(self) -> int:
        return sum(self._graph.nbytes[one] for one in self.dropped)

    @property
    def received_bytes(self) -> int:
        return sum(self._graph.nbytes[one] for one in self.received)

    def chain(self, storage: int) -> Chain:
        """What dropping it too would add."""
        graph, start, places, dropped = self._graph, self._saved.start, self.places, self.dropped
        reads, producers, again = graph.reads, graph.producer, self.nodes
        nodes, received, open_nodes = set[int](), set[int](), [producers[storage]]
        ms = 0.0
        while open_nodes:
            node = open_nodes.pop()
            if node in again or node in nodes:
                continue
            nodes.add(node)
            ms += graph.forward_ms[node]
            self._runs[node].add(storage)
            for read in reads[node]:
                if read in places and read not in dropped:
                    self._ends_at[read].add(storage)
                    continue
                producer = producers[read]
                if producer >= start and read not in self.checkpoints:
                    open_nodes.append(producer)
                elif read not in self.received:
                    received.add(read)
        saves = graph.nbytes[storage]
        if received:
            saves -= sum(graph.nbytes[one] for one in received)
        return Chain(ms, saves, nodes, received)

    def drop(self, storage: int, chain: Chain) -> set[int]:
        """Drop it; and those of the storages asked about of which the chain is another one now.

        That is where it ended at what is dropped, or had nodes that run again anyway now, or what is received.
        """
        self.dropped.add(storage)
        self.nodes |= chain.nodes
        self.ms += chain.ms
        changed = self._ends_at.pop(storage, set[int]())
        for node in chain.nodes:
            changed |= self._runs.pop(node, set())
        if chain.received:
            self.received |= chain.received
            readers = (user for one in chain.received for user in self._graph.users[one])
            changed = changed.union(*(self._runs.get(user, ()) for user in readers))
        return changed - self.dropped

    def extend(self, until: Numbers) -> None:
        """Tell `until` (by places in `saved`) from which node's backward on what was dropped is there again.

        A node runs again when the first backward needs what was dropped of it, or a node that reads what is not kept of
        it runs again; what comes back from the host is there by then too.
        """
        graph, saved, places = self._graph, self._saved, self.places
        needed = dict[int, int]()
        for node in sorted(self.nodes, reverse=True):
            at = saved.start
            for made in graph.makes[node]:
                if made in self.dropped:
                    at = max(at, int(saved.last_saver[places[made]]))
                elif made in places or made in self.received:
                    continue
                at = max(at, max((needed[user] for user in graph.users[made] if user in needed), default=at))
            needed[node] = at
            for made in graph.makes[node]:
                if made in self.dropped:
                    until[places[made]] = at
            for read in graph.reads[node]:
                if read in places and read not in self.dropped:
                    until[places[read]] = max(until[places[read]], at)
