"""What it takes to compute dropped storages again from what is kept: savings do not add up, some cost memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from evenpipe.partition.search.ranges import Saved

__all__ = ["Chain", "Recomputation"]


class Chain(NamedTuple):
    """What dropping one more storage adds: nodes that run again, in so many ms, and storages that must be kept then.

    saves: bytes, less those of storages that an earlier stage sent, and of checkpoints, that are kept for this alone.
    """

    ms: float
    saves: int
    nodes: Collection[int]
    received: Collection[int] = ()


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
        self.dropped_bytes = 0
        self.nodes = set[int]()
        self.received = set[int]()
        self.ms = 0.0
        self._ends_at, self._runs = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)

    @property
    def received_bytes(self) -> int:
        return sum(self._graph.nbytes[one] for one in self.received)

    def first_chain(self, storage: int) -> Chain:
        """What dropping it would add before any other is: as in the whole model, if all of its chain is here."""
        alone = self._graph.alone[storage]
        whole = alone.first_node >= self._saved.start and all(one in self.places for one in alone.ends)
        if whole and not self.checkpoints:
            return Chain(alone.ms, self._graph.nbytes[storage], alone.nodes)
        return self.chain(storage)

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
        """Drop it; and those of the storages that are not of which the chain may be another one now.

        That is where it ended at what is dropped, or had nodes that run again anyway now, or what is received.
        """
        graph = self._graph
        self.dropped.add(storage)
        self.dropped_bytes += graph.nbytes[storage]
        self.nodes.update(chain.nodes)
        self.ms += chain.ms
        changed = self._ends_at.pop(storage, set[int]())
        changed.update(graph.ended_by[storage])
        for node in chain.nodes:
            changed |= self._runs.pop(node, set())
            changed.update(graph.runs_for[node])
        if chain.received:
            self.received.update(chain.received)
            readers = (user for one in chain.received for user in graph.users[one])
            changed = changed.union(*(self._runs.get(user, ()) for user in readers))
        return {one for one in changed if one in self.places and one not in self.dropped}

    def extend(self, until: list[int]) -> None:
        """Tell `until` (by places in `saved`) from which node's backward on what was dropped is there again.

        A node runs again when the first backward needs what was dropped of it, or a node that reads what is not kept of
        it runs again; what comes back from the host is there by then too.
        """
        graph, saved, places, dropped = self._graph, self._saved, self.places, self.dropped
        makes, reads, producers, last_saver = graph.makes, graph.reads, graph.producer, saved.last_savers
        needed = dict.fromkeys(self.nodes, saved.start)
        for node in sorted(needed, reverse=True):
            at = needed[node]
            gone = [places[made] for made in makes[node] if made in dropped]
            for place in gone:
                at = max(at, last_saver[place])
            for place in gone:
                until[place] = at
            for read in reads[node]:
                if read in places and read not in dropped:
                    place = places[read]
                    if until[place] < at:
                        until[place] = at
                elif read not in self.received and needed.get(producers[read], at) < at:
                    needed[producers[read]] = at
