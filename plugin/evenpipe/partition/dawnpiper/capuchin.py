"""The swaps and recomputes of a stage that has to fit into its memory, and their time (DawnPiper §4.3: Capuchin's)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.costs.recompute import Candidates, Division, Picks, Recomputation
from evenpipe.partition.costs.storages import Graph, Saved

__all__ = ["Around", "Fit", "HostLink", "Load", "Optimize", "fit", "queued", "weigh"]

Optimize = Literal["none", "recompute", "swap+recompute"]


class Load(NamedTuple):
    """A stage that holds micro-batches of a part of the model: so many `copies`, in `budget` bytes.

    `own`: the stage computes them, so parameters, messages and what comes back for the backward need room there too.
    `left`: how many more of them are between the halves of their backward, for which the budget has still to be cut.
    """

    copies: int
    budget: float
    own: bool = True
    left: int = 0


class Fit(NamedTuple):
    """The way in which a part of the model fits, with its cost: milliseconds and bytes of a micro-batch.

    kept: from its forward to its backward. transient: held beside that by the micro-batches in their forward and
    backward: storages on their way out, and storages that are back and still needed. recompute: nodes that run again.
    swap: storages. drop: storages that are freed and computed again.
    """

    extra_ms: float
    kept: int
    transient: int
    recompute: tuple[int, ...] = ()
    swap: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()


class Around(NamedTuple):
    """The compute of a stage around a micro-batch's forward and backward of a part, in milliseconds.

    between_ms: at least, from its forward to its backward. after_ms: from its forward to the stage's next one, which
    waits for storages that are still leaving. before_ms: beside which the first storage of its backward can come back.
    """

    between_ms: float = 0.0
    after_ms: float = inf
    before_ms: float = inf


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
    """Return the cheapest way found to fit the nodes from `start` to `stop` − 1 into all `loads`; None: there is none.

    `host_gbps`: of the link to host memory, each way (10^9 bytes/s).

    First swaps that take no time, the longest FreeTime first, as long as it does not fit; then whichever of swap and
    recompute saves most bytes a millisecond (MSPS), weighed again after each pick (Capuchin §4.4, Algorithms 1, 2).
    """
    saved = graph.saved(start, stop)
    whole = Fit(0.0, saved.total, 0)
    if _fits(whole, loads):
        return whole
    if optimize == "none":
        return None
    copies = max(load.copies for load in loads)
    # Swapped storages need room on their way out and in, so less may fit with the link than without.
    gbps = [host_gbps, 0.0] if optimize == "swap+recompute" and host_gbps > 0 else [0.0]
    hosts = [HostLink(saved, one, around, copies) for one in gbps]
    best: Fit | None = None
    for host, kept in _ways(hosts, saved, copies, min(load.budget for load in loads if load.own)):
        # To run the whole forward again takes no more than pieces would.
        enough_ms = saved.forward_ms if kept else 0.0
        if best is not None and best.extra_ms <= enough_ms:
            break
        candidate = _cheapest(host, _swap_for_nothing(host, loads, kept), loads, kept)
        if candidate is not None and (best is None or candidate.extra_ms < best.extra_ms):
            best = candidate
    return best


def _ways(
    hosts: Sequence[HostLink], saved: Saved, copies: int, budget: float
) -> Iterator[tuple[HostLink, frozenset[int]]]:
    """Yield the link to swap over, and the storages that stay or are swapped while all others may be computed again.

    At first none of them stays. That may leave too much at once in the backward; then pieces are computed again one
    after the other.
    """
    for host in hosts:
        yield host, frozenset()
    pieces = Division(saved, copies)
    for host in hosts:
        for kept in pieces.checkpoints(host.free_bytes, budget):
            yield host, kept


def _fits(way: Fit, loads: Sequence[Load]) -> bool:
    return all(copies * way.kept + own * way.transient <= budget for copies, budget, own, _ in loads)


def weigh(host: HostLink, swapped: Numbers, again: Recomputation) -> Fit:
    """Return the time and bytes of swapping these places of `saved`, and of recomputing."""
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
    """Return the fewest swaps, by longest FreeTime, that make it fit, or all that overlap with compute.

    If some are `kept`, only these and what an earlier stage sent are swapped: all others are to be computed again.
    More swaps free more and delay more, so bisection finds the number.
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
    """Return the first number below `stop` from which on it holds, else `stop`; that mostly is it, so it is first."""
    if not stop or not holds(stop - 1):
        return stop
    return bisect_left(range(stop - 1), True, key=holds)


def _cheapest(host: HostLink, swapped: Numbers, loads: Sequence[Load], kept: frozenset[int]) -> Fit | None:
    """Swap or recompute, whichever saves most bytes a millisecond, until it fits.

    The bytes that are kept are known after each pick. The whole, transients included, is weighed only where so little
    is kept that it could be enough.
    """
    saved = host.saved
    # The link is full, or the FreeTime short: transfers are waited for.
    waits_ms = np.maximum(host.transfer_ms, -host.free_ms)
    weighs = (saved.nbytes > 0) & np.isfinite(host.transfer_ms) & (not kept)
    swap_ms_a_byte = np.divide(waits_ms, saved.nbytes, out=np.full(len(waits_ms), np.inf), where=weighs)
    picks = Picks(Candidates(saved, kept), swap_ms_a_byte, swapped)
    count, least = 0, float(picks.rest.min())
    if any(load.copies * least > load.budget for load in loads):
        return None
    way = weigh(host, swapped, Recomputation(saved))
    step = max(1, saved.total >> 10)
    while not _fits(way, loads):
        if count == len(picks.order):
            return None
        # With as much beside as now, this is what may be kept.
        enough = min((budget - own * way.transient) / copies for copies, budget, own, _ in loads)
        count = picks.until(min(enough, way.kept - step), count + 1)
        step *= 2  # where what comes back takes the room, not every pick is weighed
        more, again = picks.first(count)
        way = weigh(host, np.append(swapped, more), again)
    return way


class HostLink:
    """A stage's link to its host: swaps that pass beside compute, and those that are waited for (Capuchin §4.4).

    It carries a storage each way at the same time (PCIe has lanes for each), one after the other in each direction.
    FreeTime is the compute from a storage's last use in the forward to its first in the backward, less both transfers;
    on a pipeline's stage, forwards and backwards of other micro-batches are part of it. Since each of those swaps too,
    swaps are free that fit beside one forward and backward, and where forwards follow one another (GPipe's), beside
    one forward.
    """

    def __init__(self, saved: Saved, gbps: float, around: Around, copies: int) -> None:
        self.saved, self.copies, self.around = saved, copies, around
        self.period_ms = saved.forward_ms + saved.backward_ms
        self.free_bytes = gbps * 1e6 * self.period_ms
        self.transfer_ms: Numbers = np.full(len(saved.ids), np.inf)
        if gbps > 0:  # a storage that is there before the forward is another stage's, and a changed one stays
            movable = (saved.producers >= 0) & ~saved.changed
            self.transfer_ms[movable] = saved.nbytes[movable] / (gbps * 1e6)
        beside_ms = saved.forward_ms - saved.free_from_ms + around.between_ms + saved.needed_ms
        self.free_ms = beside_ms - 2 * self.transfer_ms

    def swap(self, chosen: Numbers, until: Numbers) -> tuple[float, int]:
        """Return the milliseconds of swapping `chosen` (places in `saved`) beyond compute, and bytes still leaving.

        Those bytes are on their way out when the forward ends. `until` has the node from whose backward on each is
        needed, and gets the one at which it is back; see `Saved.backward_peak`.
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
        """Return the milliseconds of swapping `chosen` beyond compute, where nothing runs again."""
        return self._transfers(chosen, self.saved.needed_ms[chosen])[2]

    def _transfers(self, chosen: Numbers, needed_ms: Numbers) -> tuple[Numbers, Numbers, float]:
        """Return when each is out, since the forward's start, and starts back, since the backward's; and `over_ms`."""
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
    """Return when each has passed a link that takes them one by one in the order in which they are ready."""
    order = np.argsort(ready_ms, kind="stable")
    upto = np.cumsum(takes_ms[order])
    start = np.maximum.accumulate(ready_ms[order] - (upto - takes_ms[order]))
    passed_ms = np.empty(len(order))
    passed_ms[order] = start + upto
    return passed_ms
