"""vPipe: layers moved between neighbours as by Kernighan and Lin, and swapped or recomputed layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Numbers
from evenpipe.partition.costs.recompute import Recomputation
from evenpipe.partition.dawnpiper.capuchin import Fit, HostLink, weigh
from evenpipe.partition.dawnpiper.problem import Problem
from rivals.layers import Layers

__all__ = ["Division", "vpipe"]


class Stage(NamedTuple):
    """Milliseconds of a micro-batch, with those that saving memory as `fit` says adds, and peak bytes."""

    ms: float
    fit: Fit
    forward_ms: float
    peak_bytes: float


class Division(NamedTuple):
    """Boundaries in layers, and what each stage comes to."""

    boundaries: list[int]
    stages: list[Stage]


def vpipe(layers: Layers, problem: Problem, memory_aware: bool = True) -> Division | None:
    """The partition it settles on; None: some stage does not fit.

    `problem`: of the same profile, with the same copies, limit and link as ours. From an even split, and from the
    fastest, a layer at an end of a stage goes to the neighbour as long as that makes the slowest stage faster, or what
    is too much less, if `memory_aware`; what stages pay for swapping and recomputing counts (its SRP algorithm).
    """
    stages, limit = problem.copies.stages, problem.limit_bytes
    known: dict[tuple[int, int, int], Stage] = {}

    def stage_of(stage: int, first: int, stop: int) -> Stage:
        key = stage, first, stop
        if key not in known:
            known[key] = _stage(layers, problem, *key)
        return known[key]

    def all_of(boundaries: list[int]) -> list[Stage]:
        return [stage_of(stage, *ends) for stage, ends in enumerate(itertools.pairwise(boundaries))]

    def rank(boundaries: list[int]) -> tuple[float, ...]:
        found = all_of(boundaries)
        excess = sum(max(0.0, one.peak_bytes - limit) for one in found) if memory_aware else 0.0
        times = sorted((one.ms for one in found), reverse=True)
        return (excess, *times)

    best = min((_descended(start, rank, stages) for start in (layers.even(stages), layers.fastest(stages))), key=rank)
    found = all_of(best)
    if any(one.peak_bytes > limit for one in found):
        return None
    return Division(best, found)


def _descended(start: list[int], rank: Callable[[list[int]], tuple[float, ...]], stages: int) -> list[int]:
    """Where moves of up to three layers over one cut make nothing better."""
    current, standing = start, rank(start)
    while True:
        moved = [
            [*current[:cut], current[cut] + by, *current[cut + 1 :]]
            for cut in range(1, stages)
            for by in (-3, -2, -1, 1, 2, 3)
            if current[cut - 1] < current[cut] + by < current[cut + 1]
        ]
        best = min(moved, key=rank, default=current)
        if rank(best) >= standing:
            return current
        current, standing = best, rank(best)


def _stage(layers: Layers, problem: Problem, stage: int, first: int, stop: int) -> Stage:
    """A stage of the layers `first` to `stop` − 1, with what it swaps and recomputes."""
    ends = layers.boundaries[first], layers.boundaries[stop]
    span, copies = layers.span(first, stop), problem.copies.own[stage]
    beside = problem.beside(stage, *ends)

    def peak(found: Fit) -> float:
        return beside + copies * found.kept + found.transient

    found = Fit(0.0, span.saved, 0)
    if problem.optimize != "none" and peak(found) > problem.limit_bytes:
        whole = _Layered(layers, problem, stage, first, stop)
        # Layer by layer it is not known before which of these needs least room beside; the paper does not tell.
        ways = [whole.optimised(lambda one: peak(one) <= problem.limit_bytes, *use) for use in _USES]
        found = min(ways, key=lambda one: (max(0.0, peak(one) - problem.limit_bytes), one.extra_ms))
    return Stage(span.ms + found.extra_ms, found, span.forward_ms, peak(found))


#: Whether to swap, and whether to recompute.
_USES = ((True, True), (False, True), (True, False))


class _Layered:
    """What a stage saves, of which a layer is swapped as a whole, or recomputed from what it reads.

    Bytes and milliseconds are weighed as those of our own stages are, room on the way out and back included. A layer
    leaves when its forward has ended, and is there, or computed again, when its backward begins.
    """

    def __init__(self, layers: Layers, problem: Problem, stage: int, first: int, stop: int) -> None:
        starts, graph = layers.costs.starts, problem.graph
        bounds = [int(starts[layers.boundaries[layer]]) for layer in range(first, stop + 1)]
        exact = graph.saved(bounds[0], bounds[-1])
        layer_ends = np.array(bounds[1:]) - 1
        after_use = layer_ends[np.searchsorted(layer_ends, exact.last_use)]
        self.layer = np.searchsorted(layer_ends, exact.last_saver)
        self.saved = replace(exact, last_saver=layer_ends[self.layer], last_use=after_use)
        ends = layers.boundaries[first], layers.boundaries[stop]
        around, copies = problem.around(stage, *ends), problem.copies.own[stage]
        self.link = HostLink(self.saved, problem.host_gbps, around, copies)
        self.movable = np.isfinite(self.link.transfer_ms)  # what is there before the forward is not
        self.nodes = [range(*ends) for ends in itertools.pairwise(bounds)]

    def optimised(self, fits: Callable[[Fit], bool], swaps: bool, recomputes: bool) -> Fit:
        """As ours: what costs nothing is swapped at first, and then whatever is cheapest a byte, until it fits."""
        count = len(self.nodes)
        swapped, again = list[int](), list[int]()
        while swaps and len(swapped) < count and not fits(self._weighed(swapped, again)):
            if self._weighed([*swapped, len(swapped)], again).extra_ms > 0:
                break
            swapped.append(len(swapped))
        found = self._weighed(swapped, again)
        for _, layer, swap in sorted(self._ways(set(range(count)) - set(swapped), swaps, recomputes)):
            if fits(found):
                break
            if layer not in swapped and layer not in again:
                (swapped if swap else again).append(layer)
                found = self._weighed(swapped, again)
        return found

    def _ways(self, layers: Iterable[int], swaps: bool, recomputes: bool) -> Iterable[tuple[float, int, bool]]:
        """Milliseconds a byte, the layer, and whether it is swapped."""
        for layer in layers:
            recomputed = self._weighed([], [layer])
            saves = self.saved.total - recomputed.kept
            if recomputes and saves > 0:
                yield recomputed.extra_ms / saves, layer, False
            mine = (self.layer == layer) & self.movable
            if swaps and mine.any():
                yield float(self.link.transfer_ms[mine].sum() / max(1, self.saved.nbytes[mine].sum())), layer, True

    def _weighed(self, swapped: list[int], again: list[int]) -> Fit:
        places: Numbers = np.flatnonzero(np.isin(self.layer, swapped) & self.movable)
        return weigh(self.link, places, self._recomputed(again))

    def _recomputed(self, layers: list[int]) -> Recomputation:
        """What is made and read in one of these layers alone is dropped; what they read is kept."""
        found, graph = Recomputation(self.saved), self.saved.graph
        for layer in layers:
            nodes = self.nodes[layer]
            found.ms += sum(graph.forward_ms[node] for node in nodes)
            found.nodes |= set(nodes)
            found.dropped |= {
                made
                for node in nodes
                for made in graph.makes[node]
                if made in self.saved.places and all(user in nodes for user in graph.users[made])
            }
            reads = {read for node in nodes for read in graph.reads[node] if 0 <= graph.producer[read] < nodes.start}
            found.received |= {read for read in reads if read not in self.saved.places}
        found.dropped_bytes = sum(graph.nbytes[one] for one in found.dropped)
        return found
