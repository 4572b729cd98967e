"""What it takes to compute dropped storages again from what is kept: savings do not add up, some cost memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.costs.storages import Graph, Saved

__all__ = ["Candidates", "Chain", "Division", "Picks", "Recomputation", "RecomputedBytes"]


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


#: Each size of pieces that is considered is that part of the one before.
_FINER = 0.75
#: So many sizes are tried, where the estimate says that they could be small enough.
_MOST = 6


class _Inside(NamedTuple):
    """The storages that a stage's nodes make, as columns: by and up to which node, and whether it is saved."""

    ids: Numbers
    nbytes: Numbers
    begins: Numbers
    ends: Numbers
    is_saved: Numbers

    def crossing(self, borders: list[int]) -> Numbers:
        """Which are made before and read behind a border; a border is the last node of a piece."""
        at = np.array(borders, np.int64)
        found: Numbers = np.searchsorted(at, self.begins, "left") < np.searchsorted(at, self.ends, "left")
        return found


class Pieces(NamedTuple):
    """Borders, and bytes: of the largest piece, of what crosses and is not saved otherwise, and of what is."""

    borders: list[int]
    largest: float
    unsaved: float
    crosses: float


class Division:
    """A stage in pieces of any size, of which `copies` micro-batches keep what crosses the borders.

    Borders are where little crosses; or they are those of the model's layers.
    """

    def __init__(self, saved: Saved, copies: int) -> None:
        self._copies = copies
        self._inside = inside = _inside(saved)
        length = saved.stop - saved.start
        weights = inside.nbytes * np.where(inside.is_saved, 1, copies)
        made, gone = (np.bincount(at, weights, length) for at in (inside.begins, inside.ends))
        crossing = np.cumsum(made - gone).tolist()
        saves: Numbers = np.bincount(np.maximum(0, saved.producers - saved.start), saved.nbytes, length)
        upto = np.cumsum(saves).tolist()
        ends = [end - saved.start for end in saved.graph.layer_ends if saved.start <= end < saved.stop - 1]
        self._sizes = [self._pieces(ends, upto)]
        most, largest = upto[-1], float(saves.max())
        while most > largest:
            self._sizes.append(self._pieces(_borders(crossing, upto, most), upto))
            most *= _FINER

    def _pieces(self, borders: list[int], upto: list[float]) -> Pieces:
        inside, there = self._inside, self._inside.crossing(borders)
        unsaved, crosses = (float(inside.nbytes[there & of].sum()) for of in (~inside.is_saved, inside.is_saved))
        ends = [0.0, *(upto[border] for border in borders), upto[-1]]
        return Pieces(borders, max(high - low for low, high in pairwise(ends)), unsaved, crosses)

    def checkpoints(self, free_bytes: float, budget: float) -> Iterator[frozenset[int]]:
        """The storages that cross the borders: first where least memory is needed, and then where it may be enough.

        A piece is whole while it is backwarded. Of what crosses, `free_bytes` can be swapped for nothing: that is there
        for one micro-batch, or for none, if it leaves and comes back soon enough; both estimates have a best.
        """

        def needs(one: Pieces, there: bool) -> float:
            swapped = min(one.crosses, free_bytes)
            return self._copies * (one.unsaved + one.crosses - swapped) + there * swapped + one.largest

        chances = [one for one in self._sizes if needs(one, False) <= budget]
        if chances:
            first = [min(chances, key=lambda one: needs(one, there)) for there in (True, False)]
            known = set[frozenset[int]]()
            for one in [*first, *sorted(chances, key=lambda one: needs(one, True))]:
                crossing = frozenset(self._inside.ids[self._inside.crossing(one.borders)].tolist())
                if crossing not in known and len(known) < _MOST:
                    known.add(crossing)
                    yield crossing


def _inside(saved: Saved) -> _Inside:
    nbytes, producer, last_user = saved.graph.columns
    start, stop = saved.start, saved.stop
    ids = np.flatnonzero((producer >= start) & (producer < stop) & (last_user >= 0))
    begins = producer[ids]
    ends = np.maximum(begins, np.minimum(last_user[ids], stop - 1))
    return _Inside(ids, nbytes[ids].astype(np.float64), begins - start, ends - start, saved.is_here[ids])


def _borders(crossing: list[float], upto: list[float], most: float) -> list[int]:
    """The last nodes of pieces that save at most so much, where they can be cut so; the last of those as quiet."""
    found, base = list[int](), 0.0
    while upto[-1] - base > most:
        low = max(bisect_right(upto, base + most / 4), found[-1] + 1 if found else 0)
        if low >= len(upto) - 1:
            break
        high = max(bisect_right(upto, base + most), low + 1)
        quietest = min(crossing[low:high])
        border = high - 1
        while crossing[border] > quietest:
            border -= 1
        found.append(border)
        base = upto[border]
    return found


#: Classes of nodes by the milliseconds that a byte takes to be computed again.
_CLASSES = 24
#: A node on the way to more than so many is left out.
_MANY = 8


class RecomputedBytes:
    """The bytes that nodes make and that backwards need, by what they take to be had again.

    Whatever a node makes, it runs again in full for any of it; and so do those before it of which nothing is ever
    saved, unless what they make is kept instead, between pieces (`Division`): where that is no less than all that it
    leads to, to keep the latter takes no more. A node on the way to several counts in equal parts for each: whichever
    of them run again, the parts are no more than it takes once. So no choice takes less than parts of the nodes that
    take least a byte, in their order. Where a range starts behind a node on the way, that node's parts are taken off
    again.
    """

    def __init__(self, graph: Graph) -> None:
        count = len(graph.makes)
        made = np.array(
            [sum(graph.nbytes[one] for one in makes if graph.is_saved[one]) for makes in graph.makes], float
        )
        takes_ms = np.array(graph.forward_ms)
        split = np.zeros(count + 2)
        leads_to: list[set[int]] = [set() for _ in range(count)]
        for node in reversed(range(count)):
            for one in graph.makes[node]:
                users = {user for user in graph.users[one] if user > node}
                through = set[int]().union(*({user} if made[user] else leads_to[user] for user in users))
                if sum(made[user] for user in through) <= graph.nbytes[one]:
                    leads_to[node] |= through
            if made[node] == 0 and 0 < len(leads_to[node]) <= _MANY:
                each_ms = graph.forward_ms[node] / len(leads_to[node])
                for user in leads_to[node]:
                    takes_ms[user] += each_ms
                    split[node + 1] += each_ms
                    split[user + 1] -= each_ms
        self._split = np.cumsum(split)
        nodes = np.flatnonzero(made)
        dear = takes_ms[nodes] / made[nodes]
        order = np.argsort(dear, kind="stable")
        parts = [part for part in np.array_split(order, _CLASSES) if len(part)]
        by_class = np.zeros((len(parts), count + 1))
        for number, part in enumerate(parts):
            by_class[number, nodes[part] + 1] = made[nodes[part]]
        self._by_class = by_class.cumsum(axis=1)
        self._ms_a_byte = [float(dear[part].min()) for part in parts]

    def least_ms(self, nbytes: Numbers, starts: Numbers, stops: Numbers, else_ms: float) -> Numbers:
        """For ranges starts × stops of nodes, to save `nbytes` in each; a byte by any other way takes `else_ms`."""
        left, found = nbytes, np.zeros_like(nbytes)
        for before, ms_a_byte in zip(self._by_class, self._ms_a_byte, strict=True):
            if ms_a_byte >= else_ms or not left.any():
                break
            there = before[stops][None, :] - before[starts][:, None]
            taken = np.minimum(left, np.maximum(there, 0.0))
            found += taken * ms_a_byte
            left = left - taken
        found = np.maximum(found - self._split[starts][:, None], 0.0)
        return found + np.multiply(left, else_ms, out=np.zeros_like(left), where=left > 0)
