"""What one block of each kind takes and holds, for every way to divide a model; stages are sums of blocks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import NamedTuple

from evenpipe.planner.descriptions import Cluster, Model
from evenpipe.planner.memory.stages import Chunk, chunks_of
from evenpipe.planner.operations.operation import Parameters
from evenpipe.planner.operations.parts import Block, Blocks, Part, parts_of
from evenpipe.planner.run import Run
from evenpipe.planner.time.calibration import FITTED
from evenpipe.planner.time.kernels import Kernels
from evenpipe.planner.time.stages import PartTime, part_times

__all__ = ["Divided", "PartCost", "Profile"]

_Counts = tuple[tuple[Block, int], ...]
_PartsOf = Callable[[int, int, tuple[int, ...] | None], Sequence[_Counts]]


class PartCost(NamedTuple):
    """Of a part of the pipeline: seconds of a micro-batch, and what it holds."""

    time: PartTime
    chunk: Chunk


class Profile:
    """Every kind of block under one (t, b, recompute, e), which the number of stages does not change."""

    def __init__(self, model: Model, cluster: Cluster, run: Run, parts_of: _PartsOf) -> None:
        self._cluster, self._run = cluster, run
        self._blocks = Blocks(model, run)
        self._alone: list[Part] = [{kind: 1} for kind in self._blocks.operations]
        self._chunks = dict(zip(self._blocks.operations, chunks_of(self._alone, self._blocks), strict=True))
        self._layer: Block = "layer" if model.experts is None else "expert layer"
        self._layers = model.layers
        self._parts_of = parts_of
        self.balanced = cache(self._balanced)

    @cached_property
    def _of(self) -> Mapping[Block, PartCost]:
        """Times are longer to find than bytes, and not of what does not fit anyway."""
        times = part_times(self._alone, self._blocks, Kernels(self._run, self._cluster, FITTED))
        each = zip(self._chunks.items(), times, strict=True)
        return {kind: PartCost(time, chunk) for (kind, chunk), time in each}

    def parameters(self, stages: int) -> Parameters:
        """Of all stages, one GPU of each."""
        every = self._parts_of(stages, 1, (0,) * (stages - 1) + (self._layers,))
        each = [(self._chunks[kind].parameters, count) for part in every for kind, count in part]
        return Parameters(*(sum(one[field] * count for one, count in each) for field in range(2)))

    def parts(self, stages: int, chunks: int, layout: tuple[int, ...] | None) -> list[PartCost]:
        """Each part of the pipeline, in the order of the model."""
        parts = self._parts_of(stages, chunks, layout)
        summed = {part: self._summed(part) for part in set(parts)}
        return [summed[part] for part in parts]

    def _summed(self, part: _Counts) -> PartCost:
        each = [(self._of[kind], count) for kind, count in part]
        mask = max((one.chunk.mask_bytes for one, _ in each), default=0.0)
        return PartCost(
            PartTime(*(sum(one.time[field] * count for one, count in each) for field in range(3))),
            Chunk(
                Parameters(*(sum(one.chunk.parameters[field] * count for one, count in each) for field in range(2))),
                sum((one.chunk.kept_bytes - one.chunk.mask_bytes) * count for one, count in each) + mask,
                max((one.chunk.working_bytes for one, _ in each), default=0.0),
                mask,
            ),
        )

    def _balanced(self, parts: int) -> tuple[int, ...]:
        """Layers of each part such that the slowest is as fast as can be, with what the ends have beside layers.

        Layer by layer to the part that is then the fastest: with layers that are alike there is nothing better. Of
        equal ones the later part takes it, as earlier ones hold more micro-batches.
        """
        bare = self._parts_of(parts, 1, (0,) * (parts - 1) + (self._layers,))
        ends = [
            sum(sum(self._of[kind].time[:2]) * n for kind, n in part if not kind.endswith("layer")) for part in bare
        ]
        each = sum(self._of[self._layer].time[:2])
        queue = [(end + each, -position) for position, end in enumerate(ends)]
        heapq.heapify(queue)
        layers = [0] * parts
        for _ in range(self._layers):
            seconds, position = queue[0]
            layers[-position] += 1
            heapq.heapreplace(queue, (seconds + each, position))
        return tuple(layers)


class Divided:
    """Profiles of one model on one cluster, made when first asked for."""

    def __init__(self, model: Model, cluster: Cluster) -> None:
        self._model = model
        self._cluster = cluster
        self._profiles: dict[Run, Profile] = {}
        self._parts = cache(self._parts_of)

    def of(self, run: Run) -> Profile:
        """A block does not know of stages and replicas: those that share out experts are counted by ``expert``."""
        key = replace(run, global_batch=1, data=1, stages=1, chunks=1, layout=None, placement="replicas")
        if key not in self._profiles:
            self._profiles[key] = Profile(self._model, self._cluster, key, self._parts)
        return self._profiles[key]

    def _parts_of(self, stages: int, chunks: int, layout: tuple[int, ...] | None) -> Sequence[_Counts]:
        run = Run(global_batch=1, stages=stages, chunks=chunks, layout=layout)
        return [tuple(part.items()) for part in parts_of(self._model, run)]
