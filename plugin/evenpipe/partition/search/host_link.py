"""A stage's link to its host: what can be swapped beside compute, and what is waited for (Capuchin §4.4)."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from evenpipe.partition.search.costs import Numbers
from evenpipe.partition.search.ranges import Saved

__all__ = ["Around", "HostLink", "queued"]


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
