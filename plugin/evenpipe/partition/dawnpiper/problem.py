"""What is searched: which ranges may be which part of the model, how long each takes, and what it does to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Costs, Numbers
from evenpipe.partition.costs.recompute import RecomputedBytes
from evenpipe.partition.costs.storages import Graph
from evenpipe.partition.dawnpiper.capuchin import Around, Fit, Load, Optimize, fit
from evenpipe.partition.dawnpiper.copies import Copies

__all__ = ["Cap", "Cell", "PartitionError", "Problem", "check_cuts"]

#: A range of so many nodes takes twice as long to weigh as one of a few.
_AS_LONG = 400


class PartitionError(ValueError):
    """There is no such partition; the message is one line that names the argument and the remedy."""


class Cap(NamedTuple):
    """A position's share of a stage's memory: `copies` of its micro-batches, in `nbytes`.

    `own`: the stage that computes it, where parameters, messages and what a backward brings back count too.
    """

    copies: int
    nbytes: float
    own: bool = True


class Cell(NamedTuple):
    """A range as a position: milliseconds with what memory optimisation adds (T + T^moo), and how it fits."""

    ms: float
    fit: Fit


def check_cuts(costs: Costs, stages: int, positions: int) -> None:
    """Raises PartitionError for more positions than the model can be cut into."""
    if positions > costs.last:
        chunks = f" × {positions // stages} chunks" if positions > stages else ""
        raise PartitionError(
            f"stages={stages}: {stages} stages{chunks} need {positions - 1} cuts, and the model has {costs.last - 1} "
            "valid ones: use fewer"
        )


@dataclass
class _Known:
    """Ranges by position, first and last boundary, as they have been weighed; and how much that was."""

    cells: dict[tuple[int, int, int], Cell | None] = field(default_factory=dict)
    weighed: float = 0.0


@dataclass(frozen=True, eq=False)
class Problem:
    """A profile to cut for a schedule, in `limit_bytes` a stage; `host_gbps`: of each stage's link to its host.

    `places`: the boundaries among which the exact search cuts; None: all.

    Ranges are pairs of boundaries (see `Costs`). Each position of the model fits if it does so under all its `caps`;
    where stages hold parts of several positions, which caps they share is for `evenpipe.partition.search.exact`.
    """

    costs: Costs
    copies: Copies
    limit_bytes: int
    optimize: Optimize = "none"
    host_gbps: float = 0.0
    caps: tuple[tuple[Cap, ...], ...] = ()
    places: Numbers | None = None
    _known: _Known = field(default_factory=_Known)

    def __post_init__(self) -> None:
        check_cuts(self.costs, self.copies.stages, self.copies.positions)
        if not self.caps:
            object.__setattr__(self, "caps", tuple(map(self._alone, range(self.copies.positions))))

    def _alone(self, position: int) -> tuple[Cap, ...]:
        """What a position can have of every stage that holds any of it, if the stage holds nothing else."""
        owner = self.copies.owners[position]
        most = [(stage, self.copies.most(stage, position)) for stage in range(self.copies.stages)]
        return tuple(Cap(copies, self.limit_bytes, stage == owner) for stage, copies in most if copies)

    @cached_property
    def least_ms(self) -> float:
        """What no longest position is below: the mean, and the longest piece between two boundaries."""
        upto = self.costs.upto_ms
        return max(float(upto[-1]) / self.copies.positions, float(np.diff(upto).max()))

    def within(self, limit_bytes: int) -> Problem:
        """The same with another limit."""
        return replace(self, limit_bytes=limit_bytes, caps=(), _known=_Known())

    def among(self, places: Numbers) -> Problem:
        """The same, cut at these boundaries alone; what is known of ranges is shared."""
        found = replace(self, places=places)
        found.__dict__["graph"] = self.graph  # as the cached property has it
        return found

    def capped(self, position: int, cap: Cap) -> Problem:
        """The same with one more cap; what is known of other positions stays known."""
        caps = (*self.caps[:position], (*self.caps[position], cap), *self.caps[position + 1 :])
        known = {key: cell for key, cell in self._known.cells.items() if key[0] != position}
        return replace(self, caps=caps, _known=_Known(known, self.weighed))

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.costs.profile)

    def static(self, position: int, firsts: Numbers, lasts: Numbers) -> Numbers:
        """Bytes of parameters with what belongs to them."""
        return self.costs.static(firsts, lasts, self.copies.versions[position])

    def room(self, position: int, firsts: Numbers, lasts: Numbers, *, messages: bool = True) -> Numbers:
        """Bytes that a micro-batch may keep saved in each range, by all caps; without messages it shrinks with more."""
        beside = self.static(position, firsts, lasts)
        if messages:
            beside = beside + self.costs.messages(firsts, lasts)
        rooms = [(cap.nbytes - cap.own * beside) / cap.copies for cap in self.caps[position]]
        found: Numbers = np.minimum.reduce(rooms)
        return found

    def may_fit(self, position: int, firsts: Numbers, lasts: Numbers) -> Numbers:
        """Whether a range passes a test that, once failed, all larger ones fail: without messages, what cannot go."""
        room = self.room(position, firsts, lasts, messages=False)
        least = self.costs.saved(firsts, lasts) if self.optimize == "none" else 0.0
        fits: Numbers = room >= least
        return fits

    def lower_ms(self, position: int, firsts: Numbers, lasts: Numbers) -> tuple[Numbers, Numbers]:
        """At least how long each range takes, infinite where it certainly does not fit; and where that is exact."""
        ms = self.costs.ms(firsts, lasts)
        excess = self.costs.saved(firsts, lasts) - self.room(position, firsts, lasts)
        exact = excess <= 0
        if self.optimize == "none":
            ms[~exact] = np.inf
        else:
            ms += self._lower_extra_ms(ms, excess, firsts, lasts)
        empty = firsts[:, None] >= lasts[None, :]
        ms[empty] = np.inf
        return ms, exact | np.isinf(ms)

    def _lower_extra_ms(self, ms: Numbers, excess: Numbers, firsts: Numbers, lasts: Numbers) -> Numbers:
        """At least what saving `excess` bytes a micro-batch takes.

        Whatever is computed again, its producer runs again (`RecomputedBytes`). A storage that is swapped passes the
        link once each way, which is waited for beyond a forward and a backward (`capuchin.HostLink`).
        """
        left = np.maximum(excess, 0.0)
        swap_ms = 1 / (self.host_gbps * 1e6) if self._swaps else np.inf
        if self._swaps:
            left = np.maximum(left - ms / swap_ms, 0.0)
        starts, stops = self.costs.starts[firsts], self.costs.starts[lasts]
        return self._recomputed.least_ms(left, starts, stops, swap_ms)

    @property
    def _swaps(self) -> bool:
        return self.optimize == "swap+recompute" and self.host_gbps > 0

    @cached_property
    def _recomputed(self) -> RecomputedBytes:
        return RecomputedBytes(self.graph)

    @property
    def weighed(self) -> float:
        """How much has been: a range is one, and one more for every 400 nodes; it takes a millisecond or two."""
        return self._known.weighed

    def cell(self, position: int, first: int, last: int) -> Cell | None:
        """The range as this position, as it is optimised to fit; None if it does not."""
        key, known = (position, first, last), self._known
        if key not in known.cells:
            known.cells[key] = self._weigh(*key)
            known.weighed += 1 + int(self.costs.starts[last] - self.costs.starts[first]) / _AS_LONG
        return known.cells[key]

    def _weigh(self, position: int, first: int, last: int) -> Cell | None:
        beside = self.beside(position, first, last)
        loads = [Load(cap.copies, cap.nbytes - cap.own * beside, cap.own) for cap in self.caps[position]]
        start, stop = int(self.costs.starts[first]), int(self.costs.starts[last])
        found = fit(self.graph, start, stop, loads, self.optimize, self.host_gbps, self.around(position, first, last))
        if found is None:
            return None
        return Cell(float(self.costs.upto_ms[last] - self.costs.upto_ms[first]) + found.extra_ms, found)

    def around(self, position: int, first: int, last: int) -> Around:
        """What its stage computes around a micro-batch's forward and backward of a range."""
        forward, backward = self.costs.forward_ms(first, last), self.costs.backward_ms(first, last)
        between = self.copies.between[position]
        between_ms = min(forwards * forward + backwards * backward for forwards, backwards in between)
        after, before = self.copies.beside[position]
        return Around(between_ms, after * backward, before * forward)

    def peaks(self, cuts: Sequence[int]) -> tuple[float, ...] | None:
        """Per stage, the most bytes in a finished partition, weighed by the schedule's walk; None: a part cannot fit.

        `cuts`: the boundaries of all positions, from 0 to the last.
        """
        parts = [self.cell(k, *ends) for k, ends in enumerate(pairwise(cuts))]
        fits = [part.fit for part in parts if part is not None]
        return self.peaks_of(cuts, fits) if len(fits) == len(parts) else None

    def peaks_of(self, cuts: Sequence[int], fits: Sequence[Fit]) -> tuple[float, ...]:
        """Per stage, the most bytes where every position does what `fits` says."""
        kept = np.array([one.kept for one in fits])
        beside = np.zeros(self.copies.stages)
        for position, (first, last) in enumerate(pairwise(cuts)):
            beside[self.copies.owners[position]] += self.beside(position, first, last) + fits[position].transient
        return tuple(float(own + (rows @ kept).max()) for own, rows in zip(beside, self.copies.live, strict=True))

    def beside(self, position: int, first: int, last: int) -> float:
        """Bytes that a position's own stage holds beside what micro-batches save: parameters and messages."""
        firsts, lasts = np.array([first]), np.array([last])
        return float((self.static(position, firsts, lasts) + self.costs.messages(firsts, lasts))[0, 0])
