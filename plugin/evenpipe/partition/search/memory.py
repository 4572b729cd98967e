"""What a stage swaps and recomputes to fit into its memory, at what cost of time (DawnPiper §4.3, after Capuchin)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from evenpipe.partition.search.checkpoints import checkpoints
from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.host_link import Around, HostLink
from evenpipe.partition.search.ranges import Graph
from evenpipe.partition.search.recompute import Chain, Recomputation

__all__ = ["Fit", "Load", "Optimize", "fit", "weigh"]

Optimize = Literal["none", "recompute", "swap+recompute"]


class Load(NamedTuple):
    """Where micro-batches of a part of the model are held: so many `copies`, in `budget` bytes.

    `own`: by the stage that computes them, where what comes back for the backward needs room beside them.
    """

    copies: int
    budget: float
    own: bool = True


class Fit(NamedTuple):
    """What a part of the model does to fit: milliseconds a micro-batch that it takes, and bytes a micro-batch.

    kept: from its forward to its backward. transient: what the micro-batches that are being forwarded and backwarded
    hold beside that: storages on their way out, and those that have come back and are needed still. recompute: nodes
    that run again. swap: storages. drop: storages that are freed and computed again.
    """

    extra_ms: float
    kept: int
    transient: int
    recompute: tuple[int, ...] = ()
    swap: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()


#: Nothing is computed between forward and backward.
_NO_OTHERS = Around()


def fit(
    graph: Graph,
    start: int,
    stop: int,
    loads: Sequence[Load],
    optimize: Optimize = "none",
    link_gbps: float = 0.0,
    around: Around = _NO_OTHERS,
) -> Fit | None:
    """The cheapest way found to have the nodes from `start` to `stop` − 1 fit into all `loads`; None: there is none.

    `link_gbps`: of the link to host memory, each way (10^9 bytes/s).

    First what can be swapped for nothing, the longest FreeTime first, as long as it does not fit; then what saves most
    bytes a millisecond (MSPS) of swap and recompute, weighed again after each pick (Capuchin §4.4, Algorithms 1, 2).
    """
    saved = graph.saved(start, stop)
    whole = Fit(0.0, saved.total, 0)
    if _fits(whole, loads):
        return whole
    if optimize == "none":
        return None
    copies = max(one.copies for one in loads)
    # Most bytes a millisecond may leave too much that is there at once in the backward. Then pieces are computed again
    # one after the other; what is swapped needs room on its way out and in, so that the least may be had without.
    gbps = [link_gbps, 0.0] if optimize == "swap+recompute" and link_gbps > 0 else [0.0]
    hosts = [HostLink(saved, one, around, copies) for one in gbps]
    best: Fit | None = None
    for host, in_pieces in ((hosts[0], False), *((host, True) for host in hosts)):
        kept = checkpoints(saved, copies, host.free_bytes) if in_pieces else frozenset[int]()
        found = _cheapest(host, _swap_for_nothing(host, loads, kept), loads, kept)
        if found is not None and (best is None or found.extra_ms < best.extra_ms):
            best = found
        if best is not None and best.extra_ms <= saved.forward_ms:  # to forward all of it again takes no more
            break
    return best


def _fits(found: Fit, loads: Sequence[Load]) -> bool:
    return all(copies * found.kept + own * found.transient <= budget for copies, budget, own in loads)


def weigh(host: HostLink, swapped: Numbers, again: Recomputation) -> Fit:
    """What swapping these places of `saved`, and recomputing, comes to."""
    saved = host.saved
    until = np.full(len(saved.ids), saved.stop - 1)
    over_ms, leaving = host.swap(swapped, until) if len(swapped) else (0.0, 0)
    if again.dropped:
        places = until.tolist()
        again.extend(places)
        until = np.array(places, np.int64)
    kept = saved.total - int(saved.nbytes[swapped].sum()) - again.dropped_bytes + again.received_bytes
    beside = max(0, saved.backward_peak(until) + again.received_bytes - kept)
    return Fit(
        over_ms + again.ms,
        kept,
        leaving + beside,
        tuple(sorted(again.nodes)),
        tuple(sorted(saved.ids[swapped].tolist())),
        tuple(sorted(again.dropped)),
    )


def _swap_for_nothing(host: HostLink, loads: Sequence[Load], kept: frozenset[int]) -> Numbers:
    """The fewest, by longest FreeTime, that make it fit, or all that overlap with compute.

    If some are `kept`, only these, and what an earlier stage sent: all others are there to be computed again.

    Both what more swaps free and what they delay only grows with their number, so halving finds it.
    """
    none = Recomputation(host.saved)
    order = np.argsort(-host.free_ms, kind="stable")
    if kept:
        sent = np.array([host.saved.graph.producer[one] < host.saved.start for one in host.saved.ids.tolist()])
        order = order[np.isin(host.saved.ids[order], list(kept)) | sent[order]]
    order = order[(host.free_ms[order] >= 0) & (np.cumsum(host.transfer_ms[order]) <= host.period_ms)]
    most = _first(lambda count: host.over_ms(order[: count + 1]) > 0, len(order))
    fewest: Numbers = order[: _first(lambda count: _fits(weigh(host, order[:count], none), loads), most)]
    return fewest


def _first(holds: Callable[[int], bool], stop: int) -> int:
    """The first number below `stop` from which on it holds, else `stop`: which is asked first, as it mostly is."""
    if not stop or not holds(stop - 1):
        return stop
    low, high = 0, stop - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _cheapest(host: HostLink, swapped: Numbers, loads: Sequence[Load], kept: frozenset[int]) -> Fit | None:
    """Swap or recompute, whichever saves most bytes a millisecond, until it fits.

    Every pick has those weighed again of which it changes the chain, and no others: it costs these and the heap's
    logarithm. What it all comes to, transients among it, is worked out when so much is saved that it could be enough.
    """
    picks = _Picks(host, swapped, kept)
    found = weigh(host, swapped, picks.again)
    step = max(1, host.saved.total >> 10)
    more = True
    while more and not _fits(found, loads):
        # As much beside as now: then this is what may be kept.
        enough = min((budget - own * found.transient) / copies for copies, budget, own in loads)
        rest = found.kept
        while more and rest > min(enough, found.kept - step):
            entry = picks.best()
            more = entry is not None
            if entry is not None:
                rest -= picks.pick(entry)
        step *= 2  # where what comes back is what takes the room, it is not worked out for every pick
        found = weigh(host, np.append(swapped, np.array(picks.swapped, np.int64)), picks.again)
    return found if _fits(found, loads) else None


#: The ms a byte of the better way for the storage at a place of `saved`, that place, and whether it is to swap it.
_Entry = tuple[float, int, bool]


class _Picks:
    """What is picked, from a heap by MSPS: of a storage's entries only the newest counts."""

    def __init__(self, host: HostLink, swapped: Numbers, kept: frozenset[int]) -> None:
        self.again = Recomputation(host.saved, kept)
        self.swapped = list[int]()
        self._saved = host.saved
        self._storages: list[int] = host.saved.ids.tolist()
        self._nbytes: list[int] = host.saved.nbytes.tolist()
        # The link is full, or the FreeTime short: what it takes on the link is waited for.
        waits_ms = np.maximum(host.transfer_ms, -host.free_ms)
        weighs = (host.saved.nbytes > 0) & np.isfinite(host.transfer_ms) & (not kept)
        self._swap_ms: list[float] = np.divide(
            waits_ms, host.saved.nbytes, out=np.full(len(waits_ms), np.inf), where=weighs
        ).tolist()
        self._chains = dict[int, Chain]()
        self._newest = dict[int, _Entry | None]()
        gone = set(swapped.tolist())
        self._heap = list[_Entry]()
        for place in range(len(self._storages)):
            if place not in gone and (entry := self._entry(place, self.again.first_chain)) is not None:
                self._newest[place] = entry
                self._heap.append(entry)
        heapify(self._heap)

    def best(self) -> _Entry | None:
        """What saves most a millisecond; None: nothing is left."""
        while self._heap:
            entry = heappop(self._heap)
            if self._newest.get(entry[1]) == entry:
                return entry
        return None

    def pick(self, entry: _Entry) -> int:
        """Swap it or drop it; and the bytes that this saves."""
        _, place, swap = entry
        del self._newest[place]
        if swap:
            self.swapped.append(place)
            return self._nbytes[place]
        chain = self._chains[place]
        for one in self.again.drop(self._storages[place], chain):
            other = self.again.places[one]
            if other in self._newest:
                newest = self._newest[other] = self._entry(other, self.again.chain)
                if newest is not None:
                    heappush(self._heap, newest)
        return chain.saves

    def _entry(self, place: int, chain_of: Callable[[int], Chain]) -> _Entry | None:
        """The better way of swap and recompute for a storage, as things are; None: neither saves anything."""
        storage, swap_ms = self._storages[place], self._swap_ms[place]
        if self._saved.graph.producer[storage] >= self._saved.start and storage not in self.again.checkpoints:
            chain = self._chains[place] = chain_of(storage)
            if chain.saves > 0 and (recompute_ms := chain.ms / chain.saves) <= swap_ms:
                return recompute_ms, place, False
        return (swap_ms, place, True) if swap_ms < inf else None
