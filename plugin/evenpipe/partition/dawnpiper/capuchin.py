"""What a stage swaps and recomputes to fit into its memory, at what cost of time (DawnPiper §4.3, after Capuchin)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.costs.recompute import Candidates, Division, Picks, Recomputation
from evenpipe.partition.costs.storages import Graph, Saved

__all__ = ["Around", "Fit", "HostLink", "Load", "Optimize", "fit", "queued", "weigh"]


class Around(NamedTuple):
    """What a stage computes around a micro-batch's forward and backward of a part, in milliseconds.

    between_ms: at least, from its forward to its backward. after_ms: from its forward to the stage's next one, which
    waits for what is still leaving. before_ms: beside which the first that its backward needs can come back.
    """

    between_ms: float = 0.0
    after_ms: float = inf
    before_ms: float = inf


class HostLink:
    """The link of a stage to its host, with what is to go over it for every micro-batch.

    It carries a storage each way at the same time (PCIe has lanes for each), one after the other in each direction.
    FreeTime is what is computed from a storage's last use in the forward to its first in the backward, less both
    transfers (Capuchin §4.4); on a pipeline's stage the forwards and backwards of other micro-batches are among it.
    Since each of those swaps too, a direction carries no more for nothing than fits beside one forward and backward,
    and where forwards follow one another (GPipe's), than beside one forward.
    """

    def __init__(self, saved: Saved, gbps: float, around: Around, copies: int) -> None:
        self.saved, self.copies, self.around = saved, copies, around
        self.period_ms = saved.forward_ms + saved.backward_ms
        self.usable = gbps > 0
        self.free_bytes = gbps * 1e6 * self.period_ms
        self.transfer_ms: Numbers = np.full(len(saved.ids), np.inf)
        if self.usable:  # what is there before the forward is somebody else's, and what is changed stays
            made = (saved.producers >= 0) & ~saved.changed
            self.transfer_ms[made] = saved.nbytes[made] / (gbps * 1e6)
        beside_ms = saved.forward_ms - saved.free_from_ms + around.between_ms + saved.needed_ms
        self.free_ms = beside_ms - 2 * self.transfer_ms

    def swap(self, chosen: Numbers, until: Numbers) -> tuple[float, int]:
        """Milliseconds that swapping `chosen` (places in `saved`) takes beyond compute, and bytes still leaving.

        Those bytes are what the forward's end finds on its way out. `until` says from which node's backward on each is
        needed, and is told where it is back; see `Saved.backward_peak`.
        """
        saved = self.saved
        out_ms, back_ms, over_ms = self._transfers(chosen, saved.backward_ms_of(until[chosen]))
        until[chosen] = saved.backward_node(back_ms)
        leaving = out_ms > saved.forward_ms
        if self.copies == 1:  # what has not left when the only micro-batch's backward starts need not come back
            until[chosen[leaving]] = saved.stop - 1
            leaving &= False
        return over_ms, int(saved.nbytes[chosen[leaving]].sum())

    def over_ms(self, chosen: Numbers) -> float:
        """Milliseconds that swapping `chosen` takes beyond compute, where nothing runs again."""
        return self._transfers(chosen, self.saved.needed_ms[chosen])[2]

    def _transfers(self, chosen: Numbers, needed_ms: Numbers) -> tuple[Numbers, Numbers, float]:
        """When each is out, since the forward's start, and starts to come back, since the backward's; and `over_ms`."""
        saved, takes = self.saved, self.transfer_ms[chosen]
        out_ms = queued(saved.free_from_ms[chosen], takes)
        back_ms = -queued(-needed_ms, takes)  # the latest starts: the same queue, backwards in time
        between_ms, after_ms, before_ms = self.around
        late_ms = np.max(out_ms - (saved.forward_ms + between_ms + back_ms), initial=0.0)
        over_ms = max(0.0, float(takes.sum()) - self.period_ms)
        waited_ms = max(0.0, float(np.max(-back_ms, initial=0.0)) - before_ms)
        if after_ms > 0:  # what is leaving goes on while a backward there waits for what comes back
            after_ms += waited_ms
        waited_ms += max(0.0, float(np.max(out_ms, initial=0.0)) - saved.forward_ms - after_ms)
        return out_ms, back_ms, max(over_ms, waited_ms, float(late_ms))


def queued(ready_ms: Numbers, takes_ms: Numbers) -> Numbers:
    """When each has passed a link that takes them one by one in the order in which they are ready."""
    order = np.argsort(ready_ms, kind="stable")
    passed = np.cumsum(takes_ms[order])
    start = np.maximum.accumulate(ready_ms[order] - (passed - takes_ms[order]))
    found = np.empty(len(order))
    found[order] = start + passed
    return found


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
    host_gbps: float = 0.0,
    around: Around = _NO_OTHERS,
) -> Fit | None:
    """The cheapest way found to have the nodes from `start` to `stop` − 1 fit into all `loads`; None: there is none.

    `host_gbps`: of the link to host memory, each way (10^9 bytes/s).

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
    # What is swapped needs room on its way out and in, so that less may be had with the link than without.
    gbps = [host_gbps, 0.0] if optimize == "swap+recompute" and host_gbps > 0 else [0.0]
    hosts = [HostLink(saved, one, around, copies) for one in gbps]
    best: Fit | None = None
    for host, kept in _ways(hosts, saved, copies, min(one.budget for one in loads if one.own)):
        # To forward all of it again takes no more than pieces would.
        enough_ms = saved.forward_ms if kept else 0.0
        if best is not None and best.extra_ms <= enough_ms:
            break
        found = _cheapest(host, _swap_for_nothing(host, loads, kept), loads, kept)
        if found is not None and (best is None or found.extra_ms < best.extra_ms):
            best = found
    return best


def _ways(
    hosts: Sequence[HostLink], saved: Saved, copies: int, budget: float
) -> Iterator[tuple[HostLink, frozenset[int]]]:
    """Over which link to swap, and which storages stay or are swapped while all others may be computed again.

    None of them: whatever saves most bytes a millisecond goes. That may leave too much that is there at once in the
    backward; then pieces are computed again one after the other.
    """
    for host in hosts:
        yield host, frozenset()
    pieces = Division(saved, copies)
    for host in hosts:
        for kept in pieces.checkpoints(host.free_bytes, budget):
            yield host, kept


def _fits(found: Fit, loads: Sequence[Load]) -> bool:
    return all(copies * found.kept + own * found.transient <= budget for copies, budget, own in loads)


def weigh(host: HostLink, swapped: Numbers, again: Recomputation) -> Fit:
    """What swapping these places of `saved`, and recomputing, comes to."""
    saved = host.saved
    until = np.full(len(saved.ids), saved.stop - 1)
    until[swapped] = saved.last_saver[swapped]
    if again.dropped:
        places = until.tolist()
        again.extend(places)
        until = np.array(places, np.int64)
    over_ms, leaving = host.swap(swapped, until) if len(swapped) else (0.0, 0)
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
        sent = host.saved.producers < host.saved.start
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

    What is kept is known after each pick; what it all comes to, transients among it, is worked out where so little is
    kept that it could be enough.
    """
    saved = host.saved
    # The link is full, or the FreeTime short: what it takes on the link is waited for.
    waits_ms = np.maximum(host.transfer_ms, -host.free_ms)
    weighs = (saved.nbytes > 0) & np.isfinite(host.transfer_ms) & (not kept)
    swap_ms_a_byte = np.divide(waits_ms, saved.nbytes, out=np.full(len(waits_ms), np.inf), where=weighs)
    picks = Picks(Candidates(saved, kept), swap_ms_a_byte, swapped)
    count, least = 0, float(picks.rest.min())
    if any(copies * least > budget for copies, budget, _ in loads):
        return None
    found = weigh(host, swapped, Recomputation(saved))
    step = max(1, saved.total >> 10)
    while not _fits(found, loads):
        if count == len(picks.order):
            return None
        # As much beside as now: then this is what may be kept.
        enough = min((budget - own * found.transient) / copies for copies, budget, own in loads)
        count = picks.until(min(enough, found.kept - step), count + 1)
        step *= 2  # where what comes back is what takes the room, it is not worked out for every pick
        more, again = picks.made(count)
        found = weigh(host, np.append(swapped, more), again)
    return found
