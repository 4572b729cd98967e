"""What it takes to compute dropped storages again from what is kept: savings do not add up, some cost memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.ranges import Saved

__all__ = ["Candidates", "Chain", "Picks", "Recomputation"]


class Recomputation:
    """Storages that one part of the model drops after its forward. Each node that it takes runs again once.

    A storage is had again from what its producer reads: from what is kept or comes back from the host, else from what
    is computed again in turn. What an earlier stage sent cannot be computed here, so it is kept, and so is what is
    changed in place, and what each stage has of the inputs, as a mask: `received`. Parameters are there. Random nodes
    draw the same numbers again.
    """

    def __init__(
        self, saved: Saved, dropped: Sequence[int] = (), nodes: Sequence[int] = (), received: Sequence[int] = ()
    ) -> None:
        self._saved = saved
        self.dropped, self.nodes, self.received = set(dropped), set(nodes), set(received)
        self.ms = sum(saved.graph.forward_ms[node] for node in nodes)
        self.dropped_bytes = sum(saved.graph.nbytes[one] for one in dropped)

    @property
    def received_bytes(self) -> int:
        return sum(self._saved.graph.nbytes[one] for one in self.received)

    def extend(self, until: list[int]) -> None:
        """Tell `until` (by places in `saved`) from which node's backward on what was dropped is there again.

        A node runs again when the first backward needs what was dropped of it, or a node that reads what is not kept of
        it runs again; what comes back from the host is there by then too.
        """
        saved, dropped = self._saved, self.dropped
        graph, places = saved.graph, saved.places
        makes, reads, producers, last_saver = graph.makes, graph.reads, graph.producer, saved.last_savers
        needed = dict.fromkeys(self.nodes, saved.start)
        for node in sorted(needed, reverse=True):
            at = needed[node]
            gone = [places[made] for made in makes[node] if made in dropped]
            for place in gone:
                if last_saver[place] > at:
                    at = last_saver[place]
            for place in gone:
                until[place] = at
            for read in reads[node]:
                if read in places and read not in dropped:
                    place = places[read]
                    if until[place] < at:
                        until[place] = at
                elif read not in self.received and needed.get(producers[read], at) < at:
                    needed[producers[read]] = at


class Chain(NamedTuple):
    """What dropping one storage alone takes: nodes that run again, in so many ms, and what must be kept for that."""

    ms: float
    nodes: tuple[int, ...]
    received: tuple[int, ...] = ()


class Candidates:
    """What a range can drop, by places in `saved`: `ms_a_byte` says in which order, infinite for what stays.

    Which of them is best, of all picks before being made, is known from the whole model (`Order`), but for the `others`
    whose chains begin before the range, or read what this range does not save, or `checkpoints`, which stay.
    """

    def __init__(self, saved: Saved, checkpoints: frozenset[int] = frozenset()) -> None:
        self.saved = saved
        graph, ids, order = saved.graph, saved.ids, saved.graph.order
        stays = np.zeros(len(graph.nbytes), bool)
        stays[list(checkpoints)] = True
        can = (saved.producers >= saved.start) & (saved.nbytes > 0) & ~stays[ids] & ~saved.changed
        ends, of = order.ends.of_some(ids)
        elsewhere = np.bincount(of, ~saved.is_here[ends], minlength=len(ids)) > 0
        other = can & (elsewhere | (order.first_node[ids] < saved.start))
        for one in checkpoints:
            if not saved.is_here[one]:
                places = [saved.places[run] for run in order.run_for[graph.producer[one]] if saved.is_here[run]]
                other[places] = can[places]
        self.ms_a_byte = np.where(can & ~other, order.ms_a_byte[ids], np.inf)
        whole = np.flatnonzero(np.isfinite(self.ms_a_byte))
        nodes, of = order.nodes.of_some(ids[whole])
        self.others = {place: self.chain(int(ids[place]), checkpoints) for place in np.flatnonzero(other).tolist()}
        self._weigh_others()
        more = [(node, place) for place, chain in self.others.items() for node in chain.nodes]
        self.nodes = np.concatenate([nodes, np.array([node for node, _ in more], np.int64)])
        self.of = np.concatenate([whole[of], np.array([place for _, place in more], np.int64)])

    def chain(self, storage: int, checkpoints: frozenset[int] = frozenset()) -> Chain:
        """What dropping it alone takes."""
        saved, graph = self.saved, self.saved.graph
        nodes, received, open_nodes = dict[int, None](), dict[int, None](), [graph.producer[storage]]
        while open_nodes:
            node = open_nodes.pop()
            if node not in nodes:
                nodes[node] = None
                for read in graph.reads[node]:
                    if read in saved.places:
                        continue
                    if graph.producer[read] >= saved.start and read not in checkpoints and not graph.changed[read]:
                        open_nodes.append(graph.producer[read])
                    else:
                        received[read] = None
        ms = sum(inf if node in graph.once else graph.forward_ms[node] for node in nodes)
        return Chain(ms, tuple(nodes), tuple(received))

    def _weigh_others(self) -> None:
        """Of those that save more than must be kept for them; what is kept for one is there for all."""
        nbytes, kept, left = self.saved.graph.nbytes, set[int](), dict(self.others)
        while left:
            now = list[int]()
            for place, chain in left.items():
                saves = int(self.saved.nbytes[place]) - sum(nbytes[one] for one in chain.received if one not in kept)
                if saves > 0 and chain.ms < inf:
                    self.ms_a_byte[place] = chain.ms / saves
                    now.append(place)
            for place in now:
                kept.update(left.pop(place).received)
            if not now:
                break


class Picks:
    """Swap or drop, whichever takes less a byte, of one place of `saved` after the other, those that take least first.

    rest: the bytes that are kept after so many picks.
    """

    def __init__(self, candidates: Candidates, swap_ms_a_byte: Numbers, swapped: Numbers) -> None:
        """`swapped`: places that are swapped already."""
        self.candidates, saved = candidates, candidates.saved
        dear = np.minimum(candidates.ms_a_byte, swap_ms_a_byte)
        dear[swapped] = np.inf
        order = np.argsort(dear, kind="stable")
        self.order = order[: int(np.isfinite(dear).sum())]
        drops = candidates.ms_a_byte <= swap_ms_a_byte
        self._drops = drops[self.order]
        never = len(self.order)
        self._pick_of = np.full(len(saved.ids), never)
        self._pick_of[self.order[self._drops]] = np.flatnonzero(self._drops)
        #: From which pick on a node runs again, and a storage is kept for that.
        self._runs_from = np.full(saved.stop - saved.start, never)
        np.minimum.at(self._runs_from, candidates.nodes - saved.start, self._pick_of[candidates.of])
        self._received_from = dict[int, int]()
        for place, chain in candidates.others.items():
            for one in chain.received:
                pick = min(int(self._pick_of[place]), self._received_from.get(one, never))
                self._received_from[one] = pick
        gone = saved.nbytes[self.order].astype(np.float64)
        for one, pick in self._received_from.items():
            if pick < never:
                gone[pick] -= saved.graph.nbytes[one]
        total = saved.total - int(saved.nbytes[swapped].sum())
        self.rest = total - np.concatenate([[0.0], np.cumsum(gone)])

    def until(self, nbytes: float, least: int) -> int:
        """After how many picks no more than so much is kept, `least` or more; all of them where it never is so."""
        enough = np.flatnonzero(self.rest[least:] <= nbytes)
        return least + int(enough[0]) if len(enough) else len(self.order)

    def made(self, count: int) -> tuple[Numbers, Recomputation]:
        """The first so many: the places that are swapped, and what is computed again."""
        saved, order, drops = self.candidates.saved, self.order[:count], self._drops[:count]
        nodes = np.flatnonzero(self._runs_from < count) + saved.start
        received = [one for one, pick in self._received_from.items() if pick < count]
        return order[~drops], Recomputation(saved, saved.ids[order[drops]].tolist(), nodes.tolist(), received)
