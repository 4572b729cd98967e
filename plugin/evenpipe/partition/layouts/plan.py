"""The best layout for a model on a pipeline, beside the even split, as a value and as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from evenpipe.partition.layouts.layers import Layer, Time, layers_of, layout_text, parts_of
from evenpipe.partition.layouts.search import best_split
from evenpipe.partition.layouts.shape import LayoutError, Pipeline, Shape
from evenpipe.partition.layouts.split import Cuts, Problem
from evenpipe.partition.layouts.work import kinds

__all__ = ["FORMAT", "LayoutPlan", "Split", "StagePlan", "even_layout", "plan_layout"]

FORMAT: Final = "evenpipe.layout/1"


@dataclass(frozen=True)
class StagePlan:
    """A stage: its chunks as Megatron writes them, milliseconds of a micro-batch through all of them, bytes at most.

    The first `recompute_layers` transformer layers of each chunk are computed again in its backward, whose milliseconds
    have that; the one layer that is there again at a time is not in the bytes.
    """

    layers: tuple[str, ...]
    forward_ms: float
    backward_ms: float
    peak_bytes: int
    recompute_layers: int = 0


@dataclass(frozen=True)
class Split:
    """A layout, and what its stages take.

    `halves`: the parts (chunk by chunk, stage by stage) that begin with the MLP of the layer whose attention the part
    before ends with; `layout` has such a layer there, so that Megatron alone would put the MLP there too.
    """

    layout: str
    stages: tuple[StagePlan, ...]
    halves: tuple[int, ...] = ()

    @property
    def cut_layers(self) -> tuple[int, ...]:
        """The numbers, from 1, of the layers that `halves` cuts."""
        parts = self.layout.split("|")
        return tuple("".join(parts[:part]).count("t") for part in self.halves)

    @property
    def max_stage_ms(self) -> float:
        return max(stage.forward_ms + stage.backward_ms for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        return {"max_stage_ms": self.max_stage_ms, **asdict(self)}


@dataclass(frozen=True)
class LayoutPlan:
    """What `--pipeline-model-parallel-layout` is best, and the even split that Megatron would make without it.

    `proven`: no layout has a faster slowest stage. `source`: what the times are from. `layers`: what was cut, by kind.
    `shape`: the model's.
    """

    best: Split
    even: Split
    proven: bool
    pipeline: Pipeline
    layers: tuple[Layer, ...]
    source: str
    search_ms: float
    shape: Shape | None = None

    @property
    def layout(self) -> str:
        return self.best.layout

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        return self.best.stages

    def to_json(self) -> dict[str, Any]:
        """A document of format `evenpipe.layout/1`."""
        return {
            "format": FORMAT,
            "search_ms": self.search_ms,
            "source": self.source,
            "proven": self.proven,
            "schedule": self.pipeline.schedule,
            "pipeline": asdict(self.pipeline),
            "shape": None if self.shape is None else asdict(self.shape),
            **self.best.to_json(),
            "even": self.even.to_json(),
            "layers": [asdict(layer) for layer in self.layers],
        }


def plan_layout(
    layers: Sequence[Layer],
    pipeline: Pipeline,
    *,
    mtp_apart: bool,
    source: str,
    limit_bytes: int | None = None,
    recompute: bool = False,
    shape: Shape | None = None,
) -> LayoutPlan:
    """The layout with the fastest slowest stage among those within `limit_bytes` a stage.

    `mtp_apart`: Megatron takes MTP layers on another stage than the loss (since 0.16). `recompute`: each stage computes
    as many layers again as it needs to fit. Raises LayoutError.
    """
    if recompute and any(not layer.symbols for layer in layers):
        raise LayoutError("--half-layers: which layers to compute again is chosen of whole ones: leave one of them out")
    if pipeline.chunks > 1 and any(not layer.symbols for layer in layers):
        # Ranks make one chunk after the other, and tied embeddings join the first with the last in between.
        raise LayoutError("--half-layers: virtual stages cannot be made of half layers: leave one of them out")
    start = time.perf_counter()
    problem = Problem(tuple(layers), pipeline, mtp_apart, limit_bytes if recompute else None)
    found = best_split(problem, limit_bytes)
    return LayoutPlan(
        best=_split(problem, found.cuts),
        even=_split(problem, problem.even),
        proven=found.proven,
        pipeline=pipeline,
        layers=problem.layers,
        source=source,
        search_ms=1e3 * (time.perf_counter() - start),
        shape=shape,
    )


def even_layout(shape: Shape, pipeline: Pipeline) -> str:
    """The even split, as a layout that Megatron takes whatever the number of layers. Raises LayoutError."""
    layers = layers_of(shape, {kind: {kind: Time(0.0, 0.0, 0)} for kind in kinds(shape)})
    problem = Problem(layers, pipeline, mtp_apart=False)
    return layout_text(parts_of(layers, problem.even))


def _split(problem: Problem, cuts: Cuts) -> Split:
    parts, stages = parts_of(problem.layers, cuts), problem.pipeline.stages
    return Split(
        layout_text(parts),
        tuple(
            StagePlan(tuple(layout_text([part]) for part in parts[stage::stages]), *cost)
            for stage, cost in enumerate(problem.costs(cuts))
        ),
        tuple(number for number, part in enumerate(parts) if part and not part[0].symbols),
    )
