"""Time and bytes of all ranges of nodes between two cuts, as matrices (DawnPiper Equation 1, §3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenpipe.partition.profile import Profile

__all__ = ["Costs", "Coverage", "Numbers"]

#: A column, or a matrix, of numbers.
Numbers = NDArray[Any]


class Coverage:
    """The weight of things by ranges of nodes: a thing counts once where one of the nodes that it touches is inside.

    A range with nodes t1 < t2 < … of a thing has one more of them than pairs of neighbours (ti, ti+1). So the thing's
    weight at each node, less its weight at each pair inside, is its weight once.
    """

    def __init__(self, nodes: int, things: Iterable[tuple[int, Sequence[int]]]) -> None:
        at, weights, first, second, pair_weights = list[int](), list[int](), list[int](), list[int](), list[int]()
        for weight, touched in things:
            if weight:
                at += touched
                weights += [weight] * len(touched)
                first += touched[:-1]
                second += touched[1:]
                pair_weights += [weight] * (len(touched) - 1)
        sums = np.bincount(np.array(at, np.int64), np.array(weights, np.float64), minlength=nodes)
        self._upto = np.concatenate([[0.0], np.cumsum(sums)])
        self._first, self._second = np.array(first, np.int64), np.array(second, np.int64)
        self._pair_weights = np.array(pair_weights, np.float64)

    def of(self, starts: Numbers, stops: Numbers) -> Numbers:
        """Return starts × stops, both ascending: the weight in the nodes from start to stop − 1; exact below 2^53."""
        single: Numbers = self._upto[stops][None, :] - self._upto[starts][:, None]
        if len(self._first):
            # Row i has the starts up to the pair's first node, column j the stops behind its second.
            row = np.searchsorted(starts, self._first, "right") - 1
            column = np.searchsorted(stops, self._second, "right")
            inside = (row >= 0) & (column < len(stops))
            flat = row[inside] * len(stops) + column[inside]
            pairs = np.bincount(flat, self._pair_weights[inside], minlength=len(starts) * len(stops))
            pairs = pairs.reshape(len(starts), len(stops))[::-1].cumsum(axis=0)[::-1]
            single = single - pairs.cumsum(axis=1)
        return np.where(starts[:, None] < stops[None, :], single, 0.0)


class Costs:
    """A profile by its boundaries: 0, the node behind each allowed cut, and the number of nodes.

    A range (a, b) has the nodes from `starts[a]` to `starts[b]` − 1. Methods take ascending numbers of boundaries, and
    return a matrix of firsts × lasts. Milliseconds and bytes of one micro-batch.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        nodes = profile.nodes
        count = len(nodes)
        cuts = [number + 1 for number, node in enumerate(nodes[:-1]) if node.cut_allowed]
        self.starts = np.array([0, *cuts, count])
        self.forward_upto = np.concatenate([[0.0], np.cumsum([node.forward_ms for node in nodes])])
        self.backward_upto = np.concatenate([[0.0], np.cumsum([node.backward_ms for node in nodes])])
        self.upto_ms = (self.forward_upto + self.backward_upto)[self.starts]
        self.cut_bytes = np.array([0, *(nodes[cut - 1].cut_bytes for cut in cuts), 0], np.float64)
        self._saved = Coverage(count, ((storage.nbytes, storage.savers) for storage in profile.storages))
        waits = [node.left_bytes > 0 for node in nodes]
        self._left = Coverage(
            count,
            [
                *((one.nbytes, [saver for saver in one.savers if waits[saver]]) for one in profile.storages),
                *((node.left_bytes, [number]) for number, node in enumerate(nodes)),
            ],
        )
        parameters = profile.parameters
        self._weights = Coverage(count, ((one.nbytes, one.users) for one in parameters))
        self._states = Coverage(count, ((one.gradient_bytes + one.optimizer_bytes, one.users) for one in parameters))

    @cached_property
    def last(self) -> int:
        """The number of the last boundary, the model's end."""
        return len(self.starts) - 1

    @cached_property
    def layers(self) -> list[int]:
        """The boundaries at both ends and behind each of the model's layers, as its author counts them."""
        ends = {end + 1 for end in self.profile.layer_ends}
        inner = [number for number, start in enumerate(self.starts.tolist()) if start in ends]
        return sorted({0, *inner, self.last})

    def ms(self, firsts: Numbers, lasts: Numbers) -> Numbers:
        """Return T_x: forward and backward of all nodes (Equation 1)."""
        ms: Numbers = self.upto_ms[lasts][None, :] - self.upto_ms[firsts][:, None]
        return ms

    def saved(self, firsts: Numbers, lasts: Numbers) -> Numbers:
        """Return the bytes of the storages that a backward in the range needs, each once."""
        return self._saved.of(self.starts[firsts], self.starts[lasts])

    def left(self, firsts: Numbers, lasts: Numbers) -> Numbers:
        """Return the bytes that wait between the halves of a backward: inputs of linear layers, outputs' gradients."""
        return self._left.of(self.starts[firsts], self.starts[lasts])

    def static(self, firsts: Numbers, lasts: Numbers, versions: int) -> Numbers:
        """Return the bytes of parameters in so many versions, with one gradient and optimizer state each."""
        starts, stops = self.starts[firsts], self.starts[lasts]
        return versions * self._weights.of(starts, stops) + self._states.of(starts, stops)

    def weights(self, first: int, last: int) -> float:
        """Return the bytes of one version of the parameters that a range uses."""
        starts, stops = self.starts[[first]], self.starts[[last]]
        return float(self._weights.of(starts, stops)[0, 0])

    def messages(self, firsts: Numbers, lasts: Numbers) -> Numbers:
        """Return the bytes of the messages over the cuts at both ends, one each."""
        return self.cut_bytes[firsts][:, None] + self.cut_bytes[lasts][None, :]

    def forward_ms(self, first: int, last: int) -> float:
        return float(self.forward_upto[self.starts[last]] - self.forward_upto[self.starts[first]])

    def backward_ms(self, first: int, last: int) -> float:
        return float(self.backward_upto[self.starts[last]] - self.backward_upto[self.starts[first]])

    def near(self, ms: float) -> tuple[Numbers, Numbers]:
        """Return, for each boundary, the first inner one within so many ms of compute, and the one behind the last."""
        upto = self.upto_ms
        return (
            np.maximum(np.searchsorted(upto, upto - ms, "left"), 1),
            np.minimum(np.searchsorted(upto, upto + ms, "right"), self.last),
        )

    def quiet(self, ms: float, ratio: float = 1.0) -> Numbers:
        """Return the inner boundaries that send at most `ratio` times the least that any within so many ms sends."""
        inner = [ends.tolist()[1:-1] for ends in self.near(ms)]
        least = np.array([self.cut_bytes[low:high].min() for low, high in zip(*inner, strict=True)])
        return 1 + np.flatnonzero(self.cut_bytes[1:-1] <= ratio * least)
