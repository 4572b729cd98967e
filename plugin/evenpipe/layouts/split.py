"""What a split of a model into parts costs: time and memory of every stage; and which splits Megatron takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenpipe.layouts.gpt import LayoutError, Pipeline
from evenpipe.layouts.layers import Layer
from evenpipe.partition.dawnpiper.copies import Workload, copies_of

__all__ = ["Cuts", "Fitted", "Problem", "StageCost"]

Cuts = tuple[int, ...]
"""The number of layers before each part but the first, ascending; part k is on stage k mod p."""


class StageCost(NamedTuple):
    """One stage: milliseconds of one micro-batch through all of its chunks, and the bytes that it holds at most.

    The first `recompute_layers` transformer layers of each chunk are computed again in its backward.
    """

    forward_ms: float
    backward_ms: float
    peak_bytes: int
    recompute_layers: int = 0

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


class Fitted(NamedTuple):
    """A stage's fit, by rows: how many layers of each chunk are computed again, the time of that, and bytes at most."""

    layers: NDArray[np.int64]
    again_ms: NDArray[np.float64]
    held: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Layers to cut for a pipeline. `mtp_apart`: MTP layers can be on another stage than the loss.

    `recompute_within`: bytes a stage into which it is made to fit by computing layers again; None: none are.
    """

    layers: tuple[Layer, ...]
    pipeline: Pipeline
    mtp_apart: bool
    recompute_within: int | None = None

    def __post_init__(self) -> None:
        most = sum(len(layer.symbols) for layer in self.layers)
        if self.pipeline.parts > len(self.layers):
            raise LayoutError(
                f"{self.pipeline.parts} (virtual) stages: the model has only {most} layers, embedding and loss among "
                "them: lower --pipeline-model-parallel-size or the number of virtual stages"
            )

    @cached_property
    def live(self) -> tuple[NDArray[np.int64], ...]:
        """Return `Copies.live` of every stage under the pipeline's schedule."""
        p, v, m = self.pipeline.stages, self.pipeline.chunks, self.pipeline.micro_batches
        if self.pipeline.schedule in ("interleaved", "interleaved-zb") and m % p:
            raise LayoutError(
                f"--global-batch-size: {m} micro-batches are no multiple of {p} stages, which virtual stages need: "
                "change it or --micro-batch-size"
            )
        # A stage holds no more than its warm-up, which is over long before these are.
        workload = Workload(self.pipeline.schedule, min(m, 2 * p * v), v)
        return copies_of(workload, p).live

    @cached_property
    def latest(self) -> Cuts:
        """The largest value of each cut: the loss is in the last part, and MTP layers not before the last chunks.

        Megatron wants MTP layers together, in the last chunk of a stage that is not the first (pipeline_parallel_
        layer_layout.py, `validate_layer_layout`), up to 0.15 beside the loss.
        """
        last, p, v = len(self.layers) - 1, self.pipeline.stages, self.pipeline.chunks
        has_mtp = len(self.layers) > 2 and self.layers[-2].kind == "mtp"
        before_mtp = ((v - 1) * p if self.mtp_apart else p * v - 2) if has_mtp else -1
        return tuple(last - 1 if cut <= before_mtp else last for cut in range(p * v - 1))

    def allowed(self, cuts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether Megatron takes each row of cuts: ascending, the first part not empty, and as `latest`.

        Between the halves of a layer no part is empty: the second takes what the first gives.
        """
        steps = np.diff(cuts, axis=1, prepend=1)
        apart = ((steps > 0) | ~self.halves[np.clip(cuts, 0, len(self.layers))]).all(axis=1)
        return np.asarray((steps >= 0).all(axis=1) & apart & (cuts <= np.array(self.latest, np.int64)).all(axis=1))

    @cached_property
    def halves(self) -> NDArray[np.bool_]:
        """Return, by the number of layers before a cut, whether it is between the halves of a layer."""
        return np.array([*(not layer.symbols for layer in self.layers), False])

    @cached_property
    def even(self) -> Cuts:
        """Transformer layers in equal numbers as Megatron lays them out; if they do not go up, first parts have more.

        The embedding is before the first of them, MTP layers and loss behind the last.
        """
        layers = sum(layer.symbols == "t" for layer in self.layers)
        each, more = divmod(layers, self.pipeline.parts)
        numbers = [each + (part < more) for part in range(self.pipeline.parts)]
        borders = [1 + int(number) for number in np.flatnonzero(~self.halves[1:-1])]
        return tuple(borders[before] for before in accumulate(numbers[:-1]))

    def costs(self, cuts: Cuts) -> tuple[StageCost, ...]:
        rows = np.array([cuts], np.int64)
        [forward, backward, held] = (found[0].tolist() for found in self.weighed(rows))
        again = (self.fitted(stage, *self._ends(rows)).layers[0] for stage in range(self.pipeline.stages))
        return tuple(map(StageCost, forward, backward, held, map(int, again)))

    def weighed(self, cuts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Return forward and backward milliseconds and peak bytes of every stage, for rows of cuts."""
        firsts, ends = self._ends(cuts)
        forward, backward = (sums[ends] - sums[firsts] for sums in (self.forward_ms, self.backward_ms))
        fitted = [self.fitted(stage, firsts, ends) for stage in range(self.pipeline.stages)]
        together = [np.stack([one[:, own].sum(axis=1) for own in self.parts], axis=1) for one in (forward, backward)]
        again_ms, held = (np.stack(rows, axis=1) for rows in list(zip(*fitted, strict=True))[1:])
        return together[0], together[1] + again_ms, held

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        return np.array(self.pipeline.owners, np.int64)

    @cached_property
    def parts(self) -> list[NDArray[np.int64]]:
        return [np.flatnonzero(self.owners == stage) for stage in range(self.pipeline.stages)]

    def _known(self, stage: int, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of a stage whose ends are known."""
        return np.array([part for part in self.parts[stage].tolist() if part < ends.shape[1]], np.int64)

    def _ends(self, cuts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.pad(cuts, ((0, 0), (1, 0))), np.pad(cuts, ((0, 0), (0, 1)), constant_values=len(self.layers))

    def fitted(self, stage: int, firsts: NDArray[np.int64], ends: NDArray[np.int64]) -> Fitted:
        """Return how a stage fits, for rows of where parts begin and end: all parts, or those that are known yet.

        Megatron computes the first layers of every chunk again, as many in each (`--recompute-method block`): here the
        fewest that make it fit, all if that does not.
        """
        rows, own = len(ends), self._known(stage, ends)
        found = Fitted(np.zeros(rows, np.int64), np.zeros(rows), self._held(stage, firsts, ends))
        if self.recompute_within is None:
            return found
        first, end = (np.clip(row[:, own], *self.transformer) for row in (firsts, ends))
        for layers in range(1, int((end - first).max(initial=0)) + 1):
            open_rows = found.held > self.recompute_within
            if not open_rows.any():
                break
            last = np.minimum(first + layers, end)
            saves = np.zeros_like(ends)
            saves[:, own] = self.savable_bytes[last] - self.savable_bytes[first]
            again_ms = (self.forward_ms[last] - self.forward_ms[first]).sum(axis=1)
            more = Fitted(np.full(rows, layers), again_ms, self._held(stage, firsts, ends, saves))
            better = open_rows & (more.held < found.held)
            found = Fitted(*(np.where(better, *pair) for pair in zip(more, found, strict=True)))
        return found

    def _held(
        self, stage: int, firsts: NDArray[np.int64], ends: NDArray[np.int64], saves: NDArray[np.int64] | int = 0
    ) -> NDArray[np.int64]:
        """Return bytes at most, with so many fewer saved of each part."""
        known, own = ends.shape[1], self._known(stage, ends)
        saved = self.saved_bytes[ends] - self.saved_bytes[firsts] - saves
        static = (self.static_bytes[ends] - self.static_bytes[firsts])[:, own].sum(axis=1)
        words = np.zeros(len(ends), np.int64)
        for number, layer in enumerate(self.layers):
            if layer.words_bytes:
                inside = ((firsts[:, own] <= number) & (number < ends[:, own])).any(axis=1)
                words = np.maximum(words, inside * layer.words_bytes)
        return np.asarray(static + words + (saved @ self.live[stage][:, :known].T).max(axis=1))

    @cached_property
    def forward_ms(self) -> NDArray[np.float64]:
        """Return the forward times of all layers before each, and of all, summed; the next ones are sums alike."""
        return _sums([layer.forward_ms for layer in self.layers])

    @cached_property
    def backward_ms(self) -> NDArray[np.float64]:
        return _sums([layer.backward_ms for layer in self.layers])

    @cached_property
    def saved_bytes(self) -> NDArray[np.int64]:
        return _sums([layer.saved_bytes for layer in self.layers])

    @cached_property
    def savable_bytes(self) -> NDArray[np.int64]:
        """Return the sums of the bytes that computing layers again saves."""
        inputs = (layer.input_bytes for layer in self.layers)
        pairs = zip(self.layers, inputs, strict=True)
        return _sums([0 if kept is None else layer.saved_bytes - kept for layer, kept in pairs])

    @cached_property
    def transformer(self) -> tuple[int, int]:
        """Before the first layer that can be computed again, and behind the last."""
        again = [number for number, layer in enumerate(self.layers) if layer.input_bytes is not None]
        return (again[0], again[-1] + 1) if again else (0, 0)

    @cached_property
    def static_bytes(self) -> NDArray[np.int64]:
        return _sums([layer.static_bytes for layer in self.layers])

    @cached_property
    def total_ms(self) -> NDArray[np.float64]:
        return self.forward_ms + self.backward_ms


def _sums(values: list[Any]) -> NDArray[Any]:
    return np.concatenate([[0], np.cumsum(values)])
