"""The cost of computing dropped storages again from kept ones: savings do not add up, and some cost memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.costs.storages import Graph, Saved

__all__ = ["Candidates", "Division", "Picks", "Recomputation", "RecomputedBytes"]

#: Each size of pieces that is considered is that part of the one before.
_FINER = 0.75
#: So many sizes are tried, where the estimate says that they could be small enough.
_MOST_SIZES = 6
#: Classes of nodes by the milliseconds that a byte takes to be computed again.
_CLASSES = 24
#: A node on the way to more than so many is left out.
_MOST_SHARES = 8


class Recomputation:
    """Storages that one part of the model drops after its forward. Each node that it takes runs again once.

    A producer runs again from what it reads: from storages that are kept or come back from the host, or that are
    computed again in turn. An earlier stage's storage cannot be computed here, nor one that is changed in place, nor
    the inputs that every stage has, such as a mask: these are kept, as `received`. Parameters are there. Random nodes
    draw the same numbers again.
    """

    def __init__(
        self, saved: Saved, dropped: Sequence[int] = (), nodes: Sequence[int] = (), received: Sequence[int] = ()
    ) -> None:
        self._saved = saved
        self.dropped, self.nodes, self.received = set(dropped), set(nodes), set(received)
        self.ms = sum(saved.graph.forward_ms[node] for node in nodes)
        self.dropped_bytes = sum(saved.graph.nbytes[storage] for storage in dropped)

    @property
    def received_bytes(self) -> int:
        return sum(self._saved.graph.nbytes[storage] for storage in self.received)

    def extend(self, until: list[int]) -> None:
        """Write into `until` (by places in `saved`) from which node's backward on dropped storages are there again.

        A node runs again when the first backward needs one of its dropped storages, or when a node that reads one runs
        again; storages that it reads from the host are back by then too.
        """
        saved, dropped = self._saved, self.dropped
        graph, places = saved.graph, saved.places
        makes, reads, producers, last_saver = graph.makes, graph.reads, graph.producer, saved.last_savers
        needed = dict.fromkeys(self.nodes, saved.start)
        for node in sorted(needed, reverse=True):
            at = needed[node]
            gone = [places[storage] for storage in makes[node] if storage in dropped]
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
    """The nodes that run again to drop one storage alone, their ms, and the storages that must be kept for that."""

    ms: float
    nodes: tuple[int, ...]
    received: tuple[int, ...] = ()


class Candidates:
    """Storages that a range can drop, by places in `saved`, in the order of `ms_a_byte`: infinite for those that stay.

    The whole model's `Order` gives it, except for `others`: storages whose chains begin before the range, or read what
    the range does not save, or `checkpoints`, which stay.
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
        for checkpoint in checkpoints:
            if not saved.is_here[checkpoint]:
                run_for = order.run_for[graph.producer[checkpoint]]
                places = [saved.places[storage] for storage in run_for if saved.is_here[storage]]
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
        """Return the chain of dropping it alone."""
        places, start, graph = self.saved.places, self.saved.start, self.saved.graph

        def is_there(read: int) -> bool:
            return read in places or graph.producer[read] < start or read in checkpoints or graph.changed[read]

        nodes, ends = graph.chain(storage, is_there)
        ms = sum(inf if node in graph.once else graph.forward_ms[node] for node in nodes)
        return Chain(ms, tuple(nodes), tuple(end for end in ends if end not in places))

    def _weigh_others(self) -> None:
        """Weigh the others that save more than must be kept for them; a storage kept for one is there for all."""
        nbytes, kept, left = self.saved.graph.nbytes, set[int](), dict(self.others)
        while left:
            worthwhile = list[int]()
            for place, chain in left.items():
                saves = int(self.saved.nbytes[place]) - sum(nbytes[one] for one in chain.received if one not in kept)
                if saves > 0 and chain.ms < inf:
                    self.ms_a_byte[place] = chain.ms / saves
                    worthwhile.append(place)
            for place in worthwhile:
                kept.update(left.pop(place).received)
            if not worthwhile:
                break


class Picks:
    """The order of swaps and drops, whichever takes less a byte for a place of `saved`; the cheapest place is first.

    rest: the bytes that are kept after so many picks.
    """

    def __init__(self, candidates: Candidates, swap_ms_a_byte: Numbers, swapped: Numbers) -> None:
        """`swapped`: places that are swapped already."""
        self.candidates, saved = candidates, candidates.saved
        ms_a_byte = np.minimum(candidates.ms_a_byte, swap_ms_a_byte)
        ms_a_byte[swapped] = np.inf
        order = np.argsort(ms_a_byte, kind="stable")
        self.order = order[: int(np.isfinite(ms_a_byte).sum())]
        self._drops = (candidates.ms_a_byte <= swap_ms_a_byte)[self.order]
        never = len(self.order)
        pick_of = np.full(len(saved.ids), never)
        pick_of[self.order[self._drops]] = np.flatnonzero(self._drops)
        #: From which pick on a node runs again, and a storage is kept for that.
        self._runs_from = np.full(saved.stop - saved.start, never)
        np.minimum.at(self._runs_from, candidates.nodes - saved.start, pick_of[candidates.of])
        self._received_from = dict[int, int]()
        for place, chain in candidates.others.items():
            for storage in chain.received:
                pick = min(int(pick_of[place]), self._received_from.get(storage, never))
                self._received_from[storage] = pick
        gone = saved.nbytes[self.order].astype(np.float64)
        for storage, pick in self._received_from.items():
            if pick < never:
                gone[pick] -= saved.graph.nbytes[storage]
        total = saved.total - int(saved.nbytes[swapped].sum())
        self.rest = total - np.concatenate([[0.0], np.cumsum(gone)])

    def until(self, nbytes: float, least: int) -> int:
        """Return after how many picks, `least` or more, no more than so much is kept; all of them if never."""
        enough = np.flatnonzero(self.rest[least:] <= nbytes)
        return least + int(enough[0]) if len(enough) else len(self.order)

    def first(self, count: int) -> tuple[Numbers, Recomputation]:
        """Return the places that the first so many picks swap, and what they compute again."""
        saved, order, drops = self.candidates.saved, self.order[:count], self._drops[:count]
        nodes = np.flatnonzero(self._runs_from < count) + saved.start
        received = [storage for storage, pick in self._received_from.items() if pick < count]
        return order[~drops], Recomputation(saved, saved.ids[order[drops]].tolist(), nodes.tolist(), received)


class Pieces(NamedTuple):
    """Borders, and bytes: of the largest piece, and of storages across borders that are not saved, and that are."""

    borders: list[int]
    largest: float
    unsaved: float
    crosses: float


class Division:
    """A stage in pieces of any size that are computed again one by one (Chen et al., 2016).

    `copies` micro-batches keep the storages across the borders: those of the model's layers, or where little crosses.
    """

    def __init__(self, saved: Saved, copies: int) -> None:
        self._copies = copies
        graph, start, stop = saved.graph, saved.start, saved.stop
        # The storages that the stage's nodes make, as columns: by and up to which of its nodes.
        producer, last_user = graph.producer_of, graph.last_user_of
        self._ids = ids = np.flatnonzero((producer >= start) & (producer < stop) & (last_user >= 0))
        self._begins = producer[ids] - start
        self._ends = np.maximum(producer[ids], np.minimum(last_user[ids], stop - 1)) - start
        self._nbytes, self._is_saved = graph.nbytes_of[ids].astype(np.float64), saved.is_here[ids]
        weights = self._nbytes * np.where(self._is_saved, 1, copies)
        begun, gone = (np.bincount(at, weights, stop - start) for at in (self._begins, self._ends))
        crossing = np.cumsum(begun - gone).tolist()
        saves: Numbers = np.bincount(np.maximum(0, saved.producers - start), saved.nbytes, stop - start)
        upto = np.cumsum(saves).tolist()
        layer_ends = [end - start for end in graph.layer_ends if start <= end < stop - 1]
        self._sizes = [self._pieces(layer_ends, upto)]
        most, largest = upto[-1], float(saves.max())
        while most > largest:
            self._sizes.append(self._pieces(_borders(crossing, upto, most), upto))
            most *= _FINER

    def _crossing(self, borders: list[int]) -> Numbers:
        """Return which storages are made before and read behind a border, the last node of a piece."""
        at = np.array(borders, np.int64)
        crossing: Numbers = np.searchsorted(at, self._begins, "left") < np.searchsorted(at, self._ends, "left")
        return crossing

    def _pieces(self, borders: list[int], upto: list[float]) -> Pieces:
        crossing = self._crossing(borders)
        unsaved, crosses = (float(self._nbytes[crossing & of].sum()) for of in (~self._is_saved, self._is_saved))
        ends = [0.0, *(upto[border] for border in borders), upto[-1]]
        return Pieces(borders, max(high - low for low, high in pairwise(ends)), unsaved, crosses)

    def checkpoints(self, free_bytes: float, budget: float) -> Iterator[frozenset[int]]:
        """Yield the storages that cross the borders: first where least memory is needed, then where it may be enough.

        A piece is whole in its backward. `free_bytes` of what crosses are swapped for nothing: one micro-batch holds
        them, or none, if they leave and come back soon enough; both estimates have a best.
        """

        def needs(pieces: Pieces, there: bool) -> float:
            swapped = min(pieces.crosses, free_bytes)
            kept = pieces.unsaved + pieces.crosses - swapped
            return self._copies * kept + there * swapped + pieces.largest

        chances = [pieces for pieces in self._sizes if needs(pieces, False) <= budget]
        if not chances:
            return
        best = [min(chances, key=lambda pieces: needs(pieces, there)) for there in (True, False)]
        known = set[frozenset[int]]()
        for pieces in [*best, *sorted(chances, key=lambda pieces: needs(pieces, True))]:
            crossing = frozenset(self._ids[self._crossing(pieces.borders)].tolist())
            if crossing not in known and len(known) < _MOST_SIZES:
                known.add(crossing)
                yield crossing


def _borders(crossing: list[float], upto: list[float], most: float) -> list[int]:
    """Return the last nodes of pieces that save at most so much, if they can be cut so; the last of the quietest."""
    borders, base = list[int](), 0.0
    while upto[-1] - base > most:
        low = max(bisect_right(upto, base + most / 4), borders[-1] + 1 if borders else 0)
        if low >= len(upto) - 1:
            break
        high = max(bisect_right(upto, base + most), low + 1)
        quietest = min(crossing[low:high])
        border = high - 1
        while crossing[border] > quietest:
            border -= 1
        borders.append(border)
        base = upto[border]
    return borders


class RecomputedBytes:
    """A lower bound of computing bytes again, for many ranges at once, so that few need to be weighed.

    A node runs again in full for any storage that it makes. So do nodes before it whose storages nobody saves, unless
    their storages are kept instead, between pieces (`Division`): where a storage is no less than all that it leads to,
    keeping the latter takes no more. A node on the way to several storages counts in equal parts for each: whichever
    of them run again, the parts are no more than it takes once. So no choice takes less than the parts of the nodes
    that take least a byte, in their order. Where a range starts behind a node on the way, that node's parts are taken
    off again.
    """

    def __init__(self, graph: Graph) -> None:
        count = len(graph.makes)
        saved = np.array(
            [sum(graph.nbytes[one] for one in makes if graph.is_saved[one]) for makes in graph.makes], float
        )
        takes_ms = np.array(graph.forward_ms)
        split = np.zeros(count + 2)
        leads_to: list[set[int]] = [set() for _ in range(count)]
        for node in reversed(range(count)):
            for storage in graph.makes[node]:
                users = {user for user in graph.users[storage] if user > node}
                through = set[int]().union(*({user} if saved[user] else leads_to[user] for user in users))
                if sum(saved[user] for user in through) <= graph.nbytes[storage]:
                    leads_to[node] |= through
            if saved[node] == 0 and 0 < len(leads_to[node]) <= _MOST_SHARES:
                each_ms = graph.forward_ms[node] / len(leads_to[node])
                for user in leads_to[node]:
                    takes_ms[user] += each_ms
                    split[node + 1] += each_ms
                    split[user + 1] -= each_ms
        self._split = np.cumsum(split)
        nodes = np.flatnonzero(saved)
        ms_a_byte = takes_ms[nodes] / saved[nodes]
        classes = [part for part in np.array_split(np.argsort(ms_a_byte, kind="stable"), _CLASSES) if len(part)]
        by_class = np.zeros((len(classes), count + 1))
        for number, members in enumerate(classes):
            by_class[number, nodes[members] + 1] = saved[nodes[members]]
        self._by_class = by_class.cumsum(axis=1)
        self._ms_a_byte = [float(ms_a_byte[members].min()) for members in classes]

    def least_ms(self, nbytes: Numbers, starts: Numbers, stops: Numbers, else_ms: float) -> Numbers:
        """Return starts × stops: the least ms to save `nbytes` in each; a byte by any other way takes `else_ms`."""
        left, least = nbytes, np.zeros_like(nbytes)
        for upto, ms_a_byte in zip(self._by_class, self._ms_a_byte, strict=True):
            if ms_a_byte >= else_ms or not left.any():
                break
            there = upto[stops][None, :] - upto[starts][:, None]
            dropped = np.minimum(left, np.maximum(there, 0.0))
            least += dropped * ms_a_byte
            left = left - dropped
        least = np.maximum(least - self._split[starts][:, None], 0.0)
        return least + np.multiply(left, else_ms, out=np.zeros_like(left), where=left > 0)
