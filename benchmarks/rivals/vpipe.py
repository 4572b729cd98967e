"""vPipe: layers moved between neighbours as by Kernighan and Lin, and swapped or recomputed layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from rivals.layers import Layers

__all__ = ["Division", "vpipe"]


class Stage(NamedTuple):
    """Milliseconds of a micro-batch, with `extra_ms` that saving memory adds, and peak bytes."""

    ms: float
    extra_ms: float
    forward_ms: float
    peak_bytes: float


class Division(NamedTuple):
    """Boundaries in layers, and what each stage comes to."""

    boundaries: list[int]
    stages: list[Stage]


def vpipe(
    layers: Layers, copies: list[tuple[int, int]], limit_bytes: int, link_gbps: float | None, memory_aware: bool = True
) -> Division | None:
    """The partition it settles on; None: some stage does not fit.

    `copies`: of activations and of weights, by stage. `link_gbps`: of the link to the host; None: no memory is
    optimised. From an even split, a layer at an end of a stage goes to the neighbour as long as that makes the
    slowest stage faster, or fewer stages too large, or what is too much less, if `memory_aware`; what stages pay for
    swapping and recomputing counts (its SRP algorithm).
    """
    stages = len(copies)

    def weigh(stage: int, first: int, stop: int) -> Stage:
        return _optimised(layers, first, stop, copies[stage], limit_bytes, link_gbps)

    known: dict[tuple[int, int, int], Stage] = {}

    def stage_of(stage: int, first: int, stop: int) -> Stage:
        key = stage, first, stop
        if key not in known:
            known[key] = weigh(*key)
        return known[key]

    def all_of(boundaries: list[int]) -> list[Stage]:
        return [stage_of(stage, *ends) for stage, ends in enumerate(itertools.pairwise(boundaries))]

    def rank(boundaries: list[int]) -> tuple[float, ...]:
        found = all_of(boundaries)
        excess = sum(max(0.0, one.peak_bytes - limit_bytes) for one in found) if memory_aware else 0.0
        times = sorted((one.ms for one in found), reverse=True)
        return (excess, *times)

    best = min((_descended(start, rank, stages) for start in (layers.even(stages), layers.fastest(stages))), key=rank)
    found = all_of(best)
    if any(one.peak_bytes > limit_bytes for one in found):
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


def _optimised(
    layers: Layers, first: int, stop: int, copies: tuple[int, int], limit_bytes: int, link_gbps: float | None
) -> Stage:
    """A stage with the cheapest layers swapped or recomputed until it fits.

    A layer that is swapped is free as long as all that travels passes the link beside one forward and backward. While
    it is backwarded, a layer that was swapped or recomputed is whole again, one at a time. This is generous: swaps of
    DawnPiper's also need room on their way out and back, and time enough in between.
    """
    span = layers.span(first, stop)
    activations, versions = copies
    beside = span.static + (versions - 1) * span.weights + span.messages
    single = [layers.span(layer, layer + 1) for layer in range(first, stop)]
    kept, extra_ms, link_ms, largest = float(span.saved), 0.0, 0.0, 0.0
    left = sorted(range(len(single)), key=lambda layer: single[layer].saved, reverse=True)
    while link_gbps and left and beside + activations * kept + largest > limit_bytes:
        ways = []
        for layer in left:
            one = single[layer]
            waits_ms = max(0.0, link_ms + one.saved / (link_gbps * 1e6) - span.ms)
            ways.append((waits_ms / max(1, one.saved), layer, one.saved, waits_ms, True))
            if one.saved > one.input:
                ways.append(
                    (one.forward_ms / (one.saved - one.input), layer, one.saved - one.input, one.forward_ms, False)
                )
        _, layer, saves, costs_ms, swapped = min(ways)
        left.remove(layer)
        kept -= saves
        if swapped:
            link_ms += single[layer].saved / (link_gbps * 1e6)
        else:
            extra_ms += costs_ms
        largest = max(largest, float(single[layer].saved))
    extra_ms += max(0.0, link_ms - span.ms)
    return Stage(span.ms + extra_ms, extra_ms, span.forward_ms, beside + activations * max(kept, 0.0) + largest)
