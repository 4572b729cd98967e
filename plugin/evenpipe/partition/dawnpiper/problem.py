"""The partition problem: minimise max(T_x + T_x^moo) over stages x, within their memory (DawnPiper §4.2)."""

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
from evenpipe.partition.dawnpiper.copies import Copies, Workload, copies_of
from evenpipe.partition.profile import Profile

__all__ = ["Cell", "PartitionError", "Problem"]

#: A range of so many nodes takes twice as long to weigh as one of a few.
_AS_LONG = 400


class PartitionError(ValueError):
    """There is no such partition; the message is one line that names the argument and the remedy."""


class Cell(NamedTuple):
    """A range as a position: milliseconds with what memory optimisation adds (T + T^moo), and how it fits."""

    ms: float
    fit: Fit


def _check_cuts(costs: Costs, stages: int, positions: int) -> None:
    """Raise PartitionError for more positions than the model can be cut into."""
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

    Ranges are pairs of boundaries (see `Costs`). Each position of the model fits if it does so under all its `loads`,
    one for each stage that holds any of it. Where stages hold parts of several positions, `evenpipe.partition.search`
    finds which loads they share.
    """

    costs: Costs
    copies: Copies
    limit_bytes: int
    optimize: Optimize = "none"
    host_gbps: float = 0.0
    loads: tuple[tuple[Load, ...], ...] = ()
    places: Numbers | None = None
    _known: _Known = field(default_factory=_Known)

    @classmethod
    def of(
        cls,
        profile: Profile,
        workload: Workload,
        stages: int,
        limit_bytes: int,
        optimize: Optimize = "none",
        host_gbps: float = 0.0,
    ) -> Problem:
        """Return the problem of a profile. Raises PartitionError for too few cuts, and as `copies_of` does."""
        costs = Costs(profile)
        _check_cuts(costs, stages, stages * workload.chunks)  # before a schedule of so many is made and verified
        return cls(costs, copies_of(workload, stages), limit_bytes, optimize, host_gbps)

    def __post_init__(self) -> None:
        _check_cuts(self.costs, self.copies.stages, self.copies.positions)
        if not self.loads:
            object.__setattr__(self, "loads", tuple(map(self._alone, range(self.copies.positions))))

    def _alone(self, position: int) -> tuple[Load, ...]:
        """Return the loads of a position on stages that hold nothing else."""
        owner = self.copies.owners[position]
        return tuple(
            Load(max(1, whole), self.limit_bytes, stage == owner, left)
            for stage in range(self.copies.stages)
            for whole, left in self.copies.moments(stage, position)
        )

    @cached_property
    def least_ms(self) -> float:
        """A lower bound of the longest position: the mean, and the longest piece between two boundaries."""
        upto = self.costs.upto_ms
        return max(float(upto[-1]) / self.copies.positions, float(np.diff(upto).max()))

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.costs.profile)

    @cached_property
    def _recomputed(self) -> RecomputedBytes:
        return RecomputedBytes(self.graph)

    def within(self, limit_bytes: int) -> Problem:
        """Return the same problem with another limit."""
        return replace(self, limit_bytes=limit_bytes, loads=(), _known=_Known())

    def among(self, places: Numbers) -> Problem:
        """Return the same problem, cut at these boundaries alone; it shares all weighed ranges."""
        narrowed = replace(self, places=places)
        narrowed.__dict__["graph"] = self.graph  # as the cached property has it
        return narrowed

    def with_load(self, position: int, load: Load) -> Problem:
        """Return the same problem with one more load; weighed ranges of other positions stay known."""
        loads = (*self.loads[:position], (*self.loads[position], load), *self.loads[position + 1 :])
        known = {key: cell for key, cell in self._known.cells.items() if key[0] != position}
        return replace(self, loads=loads, _known=_Known(known, self.weighed))

    def room(self, position: int, firsts: Numbers, lasts: Numbers, *, messages: bool = True) -> Numbers:
        """Return the bytes that a micro-batch may keep in each range; without messages it shrinks with more nodes."""
        beside = self.costs.static(firsts, lasts, self.copies.versions[position])
        if messages:
            beside = beside + self.costs.messages(firsts, lasts)
        left = self.costs.left(firsts, lasts) if any(load.left for load in self.loads[position]) else 0.0
        rooms = [(load.budget - load.own * beside - load.left * left) / load.copies for load in self.loads[position]]
        least: Numbers = np.minimum.reduce(rooms)
        return least

    def may_fit(self, position: int, firsts: Numbers, lasts: Numbers) -> Numbers:
        """Return whether each range passes a test that all larger ones fail once it fails: messages are left out."""
        room = self.room(position, firsts, lasts, messages=False)
        fits: Numbers = room >= (self.costs.saved(firsts, lasts) if self.optimize == "none" else 0.0)
        return fits

    def lower_ms(self, position: int, firsts: Numbers, lasts: Numbers) -> tuple[Numbers, Numbers]:
        """Return a lower bound of each range's ms, infinite where it cannot fit; and where the bound is exact."""
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
        """Return a lower bound of the ms of saving `excess` bytes a micro-batch.

        The producer of a storage that is computed again runs again (`RecomputedBytes`). A swapped storage passes the
        link once each way; beyond a forward and a backward that is waited for (`capuchin.HostLink`).
        """
        left, swap_ms = np.maximum(excess, 0.0), np.inf
        if self.optimize == "swap+recompute" and self.host_gbps > 0:
            swap_ms = 1 / (self.host_gbps * 1e6)
            left = np.maximum(left - ms / swap_ms, 0.0)
        return self._recomputed.least_ms(left, self.costs.starts[firsts], self.costs.starts[lasts], swap_ms)

    @property
    def weighed(self) -> float:
        """How many ranges have been weighed, each plus one for every 400 nodes; one takes a millisecond or two."""
        return self._known.weighed

    def cell(self, position: int, first: int, last: int) -> Cell | None:
        """Return the range as this position, optimised to fit; None if it does not."""
        key, known = (position, first, last), self._known
        if key not in known.cells:
            known.cells[key] = self._weigh(*key)
            known.weighed += 1 + int(self.costs.starts[last] - self.costs.starts[first]) / _AS_LONG
        return known.cells[key]

    def _weigh(self, position: int, first: int, last: int) -> Cell | None:
        beside, left = self.beside(position, first, last), self.left(first, last)
        loads = [
            Load(load.copies, load.budget - load.own * beside - load.left * left, load.own)
            for load in self.loads[position]
        ]
        start, stop = int(self.costs.starts[first]), int(self.costs.starts[last])
        way = fit(self.graph, start, stop, loads, self.optimize, self.host_gbps, self.around(position, first, last))
        if way is None:
            return None
        return Cell(float(self.costs.upto_ms[last] - self.costs.upto_ms[first]) + way.extra_ms, way)

    def cells(self, cuts: Sequence[int]) -> list[Cell] | None:
        """Return all positions of a partition; None at the first that is empty or does not fit.

        `cuts`: the boundaries of all positions, from 0 to the last.
        """
        cells = list[Cell]()
        for position, (first, last) in enumerate(pairwise(cuts)):
            cell = self.cell(position, first, last) if first < last else None
            if cell is None:
                return None
            cells.append(cell)
        return cells

    def around(self, position: int, first: int, last: int) -> Around:
        """Return what its stage computes around a micro-batch's forward and backward of a range."""
        forward, backward = self.costs.forward_ms(first, last), self.costs.backward_ms(first, last)
        between = self.copies.between[position]
        between_ms = min(forwards * forward + backwards * backward for forwards, backwards in between)
        after, before = self.copies.beside[position]
        return Around(between_ms, after * backward, before * forward)

    def peaks(self, cuts: Sequence[int]) -> tuple[float, ...] | None:
        """Return each stage's most bytes in a partition, by the schedule's walk; None: a part cannot fit."""
        cells = self.cells(cuts)
        return None if cells is None else self.peaks_of(cuts, [cell.fit for cell in cells])

    def peaks_of(self, cuts: Sequence[int], fits: Sequence[Fit]) -> tuple[float, ...]:
        """Return each stage's most bytes where every position does what `fits` says."""
        kept = np.array([way.kept for way in fits])
        left = np.array([self.left(*ends) for ends in pairwise(cuts)])
        beside = np.zeros(self.copies.stages)
        for position, (first, last) in enumerate(pairwise(cuts)):
            beside[self.copies.owners[position]] += self.beside(position, first, last) + fits[position].transient
        return tuple(float(own) + self.copies.peak(stage, kept, left) for stage, own in enumerate(beside))

    def as_it_is(self, cuts: Sequence[int]) -> list[Fit]:
        """Return how positions fit that do nothing about it."""
        return [Fit(0.0, self.graph.saved(*ends).total, 0) for ends in pairwise(self.costs.starts[list(cuts)].tolist())]

    def fits_of(self, cuts: Sequence[int]) -> tuple[Fit, ...]:
        """Return how each position fits; one that does not does nothing about it, and its peak shows that."""
        cells = [self.cell(position, *ends) for position, ends in enumerate(pairwise(cuts))]
        return tuple(cell.fit if cell else whole for cell, whole in zip(cells, self.as_it_is(cuts), strict=True))

    def left(self, first: int, last: int) -> float:
        """Return the bytes that a micro-batch of a range keeps between the halves of its backward."""
        return float(self.costs.left(np.array([first]), np.array([last]))[0, 0])

    def beside(self, position: int, first: int, last: int) -> float:
        """Return the bytes on a position's own stage beside what micro-batches save: parameters and messages."""
        firsts, lasts = np.array([first]), np.array([last])
        static = self.costs.static(firsts, lasts, self.copies.versions[position])
        return float((static + self.costs.messages(firsts, lasts))[0, 0])
