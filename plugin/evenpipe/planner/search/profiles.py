"""The costs of each kind of block under one division of a layer, which many runs of a search share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from evenpipe.descriptions import Model
from evenpipe.planner.iteration import PartTime, part_times
from evenpipe.planner.kernels import FITTED, Kernels
from evenpipe.planner.operations.operation import summed
from evenpipe.planner.operations.parts import Block, Blocks, Part, parts_of
from evenpipe.planner.run import Run
from evenpipe.planner.search.balanced_layout import Layout, settled_layout
from evenpipe.planner.stage_bytes import Chunk, chunk_of, chunks_of
from evenpipe.planner.stage_nodes import ONLY, Groups, StageNodes, slowest
from evenpipe.planner.uncertainty import EQUAL

__all__ = ["Divided", "PartCost", "Profile"]

_MS: Final = 1e3

_Counts = tuple[tuple[Block, int], ...]
_KernelsOf = Callable[[Groups], Sequence[Kernels]]
_PartsOf = Callable[[int, int, tuple[int, ...] | None, int | None], Sequence[_Counts]]


class PartCost(NamedTuple):
    """The cost of a part of the pipeline: seconds for a micro-batch, and what it holds."""

    time: PartTime
    chunk: Chunk


class Profile:
    """Every kind of block under one (t, b, recompute, e), which the number of stages does not change.

    ``kernels``: of each group of equal nodes among some. ``groups``: how many there are.
    """

    def __init__(self, model: Model, blocks: Blocks, kernels: _KernelsOf, groups: int, parts_of: _PartsOf) -> None:
        self._kernels, self._groups, self._blocks = kernels, groups, blocks
        apart = parts_of(3, 1, (0, model.layers, 0), 1)  # which has all that whole and divided models have
        kinds = dict.fromkeys(kind for part in (*parts_of(1, 1, None, None), *apart) for kind, _ in part)
        self._alone: list[Part] = [{kind: 1} for kind in kinds]
        self._chunks = dict(zip(kinds, chunks_of(self._alone, self._blocks), strict=True))
        self._layer: Block = "layer" if model.experts is None else "expert layer"
        self._layers, self._further, self._expert_layers = model.layers, model.mtp_layers > 0, model.expert_layers
        self._parts_of = parts_of
        self.balanced = cache(self._balanced)
        self._of = cache(self._on)

    def _on(self, groups: Groups) -> Mapping[Block, PartCost]:
        """Times are longer to find than bytes, and not of what does not fit anyway."""
        times = zip(*(part_times(self._alone, self._blocks, one) for one in self._kernels(groups)), strict=True)
        each = zip(self._chunks.items(), map(slowest, times), strict=True)
        return {kind: PartCost(time, chunk) for (kind, chunk), time in each}

    @cached_property
    def _least(self) -> Mapping[Block, float]:
        """Seconds of each kind of block, forward and backward, on the nodes where it is fastest."""
        alone = [self._of(Groups({number})) for number in range(self._groups)]
        return {kind: min(sum(on[kind].time[:2]) for on in alone) for kind in self._chunks}

    def whole(self, stages: int) -> Chunk:
        """Return all stages together, one GPU of each: parameters, and what is kept of a micro-batch beside masks."""
        every = [one for part in self._parts_of(stages, 1, self._last(stages), None) for one in part]
        chunks = [(self._chunks[kind], count) for kind, count in every]
        return Chunk(
            summed(one.parameters.times(count) for one, count in chunks),
            sum((one.kept_bytes - one.attention_mask_bytes) * count for one, count in chunks),
            0.0,
            0.0,
        )

    def least_ms(self, run: Run) -> float:
        """Return milliseconds that a sample takes at least: the slowest stage has no less work than the mean one."""
        every = [one for part in self._parts_of(run.stages, 1, self._last(run.stages), None) for one in part]
        seconds = sum(self._least[kind] * count for kind, count in every)
        return _MS * seconds * run.micro_batches / run.stages / run.global_batch

    def _last(self, stages: int) -> tuple[int, ...]:
        """All layers on the last stage."""
        return (0,) * (stages - 1) + (self._layers,)

    def parts(
        self, stages: int, chunks: int, layout: Layout | None, on: Sequence[Groups] | None = None
    ) -> list[PartCost]:
        """Return each part of the pipeline, in the order of the model; ``on``: the nodes of each, where unlike."""
        parts = self._parts_of(stages, chunks, *(layout or (None, None)))
        placed = list(zip(parts, on or [ONLY] * len(parts), strict=True))
        costs = {one: self._summed(*one) for one in set(placed)}
        return [costs[one] for one in placed]

    def _summed(self, part: _Counts, groups: Groups) -> PartCost:
        each = [(self._of(groups)[kind], count) for kind, count in part]
        times = PartTime(*(sum(one.time[field] * count for one, count in each) for field in range(3)))
        return PartCost(times, chunk_of((one.chunk, count) for one, count in each))

    def _balanced(
        self, owners: tuple[int, ...], on: tuple[Groups, ...] | None = None, most: tuple[int, ...] | None = None
    ) -> Layout:
        """Return layers that make stages equally fast; ``on``: the nodes of each, where unlike; ``most``: its layers.

        The ends count with what they have beside layers, and layers without experts as such. Further tokens are
        predicted on the stage before the loss where the slowest stage is then faster by more than equal times are
        apart, else beside the loss.
        """
        nodes = on or (ONLY,) * (max(owners) + 1)
        each = [sum(self._of(groups)[self._layer].time[:2]) for groups in nodes]

        def laid(further: int | None) -> tuple[float, Layout]:
            seconds = [
                sum(sum(self._of(nodes[stage])[kind].time[:2]) * n for kind, n in part if not kind.endswith("layer"))
                for part, stage in zip(self._parts_of(len(owners), 1, bare, further), owners, strict=True)
            ]
            ms, layers = settled_layout(
                self._layers, owners, seconds, each, most, lambda layout: self._saved(layout, owners, nodes)
            )
            return ms, Layout(layers, further)

        bare = self._last(len(owners))
        ms, found = laid(None)
        # Not on the first stage, which Megatron refuses, nor in a V, whose last part is there.
        if self._further and owners[-1] == max(owners) > 1:
            less, apart = laid(len(owners) - 2)
            found = apart if EQUAL * less < ms else found
        return found

    def _saved(self, layers: Sequence[int], owners: Sequence[int], nodes: Sequence[Groups]) -> list[float]:
        """Return the seconds that each part's layers without experts take less than with."""
        if self._layer == "layer" or "layer" not in self._chunks:  # all are alike
            return [0.0] * len(layers)
        each = [self._of(nodes[stage]) for stage in owners]
        dense = [n - self._expert_layers(end - n, end) for n, end in zip(layers, accumulate(layers), strict=True)]
        return [
            n * (sum(of[self._layer].time[:2]) - sum(of["layer"].time[:2])) for n, of in zip(dense, each, strict=True)
        ]


class Divided:
    """Profiles of one model on one cluster, made when first asked for."""

    def __init__(self, model: Model, nodes: StageNodes) -> None:
        self._model, self._nodes = model, nodes
        self._profiles: dict[Run, Profile] = {}
        self._parts = cache(self._parts_of)
        self._alike: dict[object, Sequence[Kernels]] = {}
        self._kernels = cache(lambda run: cache(lambda groups: self._kernels_of(run, groups)))
        self._blocks = cache(lambda run: Blocks(model, run))

    def of(self, run: Run) -> Profile:
        """Return the costs of the run's blocks, which know of no stages, replicas and hand-overs.

        Replicas that share out experts are counted by ``expert``.
        """
        key = run.but(global_batch=1, data=1, stages=1, chunks=1, layout=None, placement="replicas", blocking=None)
        if key not in self._profiles:
            # What is recomputed takes as long as before.
            bare = key.but(recompute="none", recomputed_modules=Run.recomputed_modules)
            blocks = Blocks(self._model, key, self._blocks(bare))
            self._profiles[key] = Profile(
                self._model, blocks, self._kernels(bare), len(self._nodes.cluster.kinds), self._parts
            )
        return self._profiles[key]

    def _kernels_of(self, run: Run, groups: Groups) -> Sequence[Kernels]:
        like, clusters = (run.precision, run.quantized, run.graphs, groups), self._nodes.clusters(groups)
        before = self._alike.get(like, [None] * len(clusters))
        found = [Kernels(run, one, FITTED, other) for one, other in zip(clusters, before, strict=True)]
        self._alike[like] = found
        return found

    def _parts_of(
        self, stages: int, chunks: int, layout: tuple[int, ...] | None, further: int | None
    ) -> Sequence[_Counts]:
        run = Run(global_batch=1, stages=stages, chunks=chunks, layout=layout, further_part=further)
        return [tuple(part.items()) for part in parts_of(self._model, run)]
