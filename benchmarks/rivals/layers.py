"""A model as its layers, which is all that the rivals see of a profile: time, saved and static bytes of every run."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import NamedTuple

import numpy as np

from evenpipe.partition.costs.matrices import Costs
from evenpipe.partition.dawnpiper.balance import evenly
from evenpipe.partition.profile import Profile

__all__ = ["Layers", "Span"]


class Span(NamedTuple):
    """Consecutive layers as a stage: milliseconds and bytes of one micro-batch. `static`: with one weight version."""

    forward_ms: float
    ms: float
    saved: int
    weights: int
    static: int
    input: int
    messages: int


class Layers:
    """Layers 0, 1, … of a profile; layer n ends where `boundaries[n + 1]` is."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.costs = Costs(profile)
        self.boundaries = self.costs.layers
        costs, at = self.costs, np.array(self.boundaries)
        one, two = (costs.static(at, at, versions).tolist() for versions in (1, 2))
        saved, messages = costs.saved(at, at).tolist(), costs.messages(at, at).tolist()
        forward, both = costs.forward_upto[costs.starts[at]].tolist(), costs.upto_ms[at].tolist()
        self._spans = {
            (first, stop): Span(
                forward_ms=forward[stop] - forward[first],
                ms=both[stop] - both[first],
                saved=int(saved[first][stop]),
                weights=int(two[first][stop] - one[first][stop]),
                static=int(one[first][stop]),
                input=int(costs.cut_bytes[at[first]]),
                messages=int(messages[first][stop]),
            )
            for first, stop in itertools.combinations(range(len(at)), 2)
        }

    @cached_property
    def count(self) -> int:
        return len(self.boundaries) - 1

    def span(self, first: int, stop: int) -> Span:
        """Of the layers from `first` to `stop` − 1."""
        return self._spans[first, stop]

    def even(self, stages: int) -> list[int]:
        """Boundaries with as many layers on every stage, as nearly as can be."""
        return list(evenly(range(self.count + 1), stages))

    def fastest(self, stages: int) -> list[int]:
        """The boundaries with which the slowest of the stages is as fast as it can be; every stage has a layer."""
        upto = [0.0, *itertools.accumulate(self.span(layer, layer + 1).ms for layer in range(self.count))]
        best = [0.0] + [float("inf")] * self.count
        back: list[list[int]] = []
        for _ in range(stages):
            row, came = [float("inf")] * (self.count + 1), [0] * (self.count + 1)
            for stop in range(1, self.count + 1):
                # Up to where the two curves meet, the earlier stages are faster than this one.
                for first in range(stop):
                    slowest = max(best[first], upto[stop] - upto[first])
                    if slowest < row[stop]:
                        row[stop], came[stop] = slowest, first
            best = row
            back.append(came)
        found = [self.count]
        for came in reversed(back):
            found.append(came[found[-1]])
        return found[::-1]
