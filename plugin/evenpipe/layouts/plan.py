"""The best layout for a model on a pipeline, beside the even split, as a value and as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter

from evenpipe.descriptions import Device
from evenpipe.layouts.gpt import Gpt, LayoutError, Pipeline
from evenpipe.layouts.layers import Layer, Time, described, kinds, layers_of, layout_text, parts_of, profile_of
from evenpipe.layouts.search import best_split
from evenpipe.layouts.split import Cuts, Problem
from evenpipe.layouts.written import FORMAT, Shape, StagePlan
from evenpipe.partition.profile import Profile
from evenpipe.runtime.processes import ChildFailed, answer_of

__all__ = ["LayoutPlan", "Split", "best_layout", "even_layout", "plan_layout", "read_flags"]

_CHILD: Final = "evenpipe.megatron_lm.layout_model"


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
    """The best `--pipeline-model-parallel-layout`, and the even split that Megatron would make without it.

    `proven`: no layout has a faster slowest stage. `source`: what the times are from. `layers`: what was cut, by kind.
    `gpt`: the model.
    """

    best: Split
    even: Split
    proven: bool
    pipeline: Pipeline
    layers: tuple[Layer, ...]
    source: str
    search_ms: float
    gpt: Gpt | None = None

    @property
    def layout(self) -> str:
        return self.best.layout

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        return self.best.stages

    def to_json(self) -> dict[str, Any]:
        """Return a document of format `evenpipe.layout/1`."""
        return {
            "format": FORMAT,
            "search_ms": self.search_ms,
            "source": self.source,
            "proven": self.proven,
            "schedule": self.pipeline.schedule,
            "pipeline": asdict(self.pipeline),
            "shape": None if self.gpt is None else asdict(Shape.of(self.gpt)),
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
    gpt: Gpt | None = None,
) -> LayoutPlan:
    """Return the layout with the fastest slowest stage among those within `limit_bytes` a stage.

    `mtp_apart`: Megatron takes MTP layers on another stage than the loss (since 0.16); not in a V. `recompute`: each
    stage computes as many layers again as it needs to fit. Raises LayoutError.
    """
    if recompute and any(not layer.symbols for layer in layers):
        raise LayoutError("--half-layers: which layers to compute again is chosen of whole ones: leave one of them out")
    if pipeline.chunks > 1 and any(not layer.symbols for layer in layers):
        # Ranks make one chunk after the other, and tied embeddings join the first with the last in between.
        raise LayoutError("--half-layers: virtual stages cannot be made of half layers: leave one of them out")
    start = time.perf_counter()
    apart = mtp_apart and pipeline.placed_by is None
    problem = Problem(tuple(layers), pipeline, apart, limit_bytes if recompute else None)
    found = best_split(problem, limit_bytes)
    return LayoutPlan(
        best=_split(problem, found.cuts),
        even=_split(problem, problem.even),
        proven=found.proven,
        pipeline=pipeline,
        layers=problem.layers,
        source=source,
        search_ms=1e3 * (time.perf_counter() - start),
        gpt=gpt,
    )


def even_layout(gpt: Gpt, pipeline: Pipeline) -> str:
    """Return the even split, as a layout that Megatron takes whatever the number of layers. Raises LayoutError."""
    layers = layers_of(gpt, {kind: {kind: Time(0.0, 0.0, 0)} for kind in kinds(gpt)})
    problem = Problem(layers, pipeline, mtp_apart=False)
    return layout_text(parts_of(layers, problem.even))


def _split(problem: Problem, cuts: Cuts) -> Split:
    parts = parts_of(problem.layers, cuts)
    return Split(
        layout_text(parts),
        tuple(
            StagePlan(tuple(layout_text([parts[part]]) for part in own), *cost)
            for own, cost in zip(problem.parts, problem.costs(cuts), strict=True)
        ),
        tuple(number for number, part in enumerate(parts) if part and not part[0].symbols),
    )


class FlagsRead(NamedTuple):
    """The model of flags and its pipeline; `mtp_apart`: as in `plan_layout`; `found`: times, and Megatron's version."""

    gpt: Gpt
    pipeline: Pipeline
    mtp_apart: bool
    found: dict[str, Any]


def read_flags(flags: Sequence[str], world_size: int | None, measure: bool) -> FlagsRead:
    """Return what flags describe, read in a process of its own. Raises LayoutError, one line."""
    asked = {"flags": list(flags), "world_size": world_size, "measure": measure}
    try:
        found = answer_of(_CHILD, asked)
    except ChildFailed as error:
        raise LayoutError(str(error)) from error
    gpt = TypeAdapter(Gpt).validate_python(found["gpt"])
    return FlagsRead(gpt, Pipeline(*found["pipeline"]), found["mtp_apart"], found)


def best_layout(
    flags: Sequence[str],
    device: Device | None = None,
    *,
    world_size: int | None = None,
    limit_bytes: int | None = None,
    half_layers: bool = False,
    recompute: bool = False,
) -> tuple[LayoutPlan, Profile]:
    """For the flags of pretrain_gpt.py, which its path may precede: a checkout's own parser then reads them.

    Times are the planner's for `device`; None: measured on this CPU, one layer of each kind. `world_size`: GPUs of the
    whole run, for the share of a distributed optimizer; None: as few as can be. `limit_bytes`: of each stage's memory.
    `half_layers`: a stage may end between a layer's attention and MLP, and `recompute`: each computes as many layers
    again as it needs to fit; either takes `--evenpipe-partition` to run.
    The profile lists every node that was timed. Megatron is not touched in the calling process.

    Raises LayoutError, one line.
    """
    gpt, pipeline, mtp_apart, found = read_flags(flags, world_size, measure=device is None)
    if recompute and gpt.run.recompute != "none":
        raise LayoutError(
            f"--recompute-granularity {gpt.run.recompute}: the plan says what each stage computes again: leave it out"
        )
    if device is None:
        times = {kind: {name: Time(*time) for name, time in nodes.items()} for kind, nodes in found["times"].items()}
    else:
        times = described(gpt, device)
    where = "cpu" if device is None else device.name
    profile = profile_of(gpt, times, device=where, versions={"megatron-core": found["version"]})
    plan = plan_layout(
        layers_of(gpt, times, half_layers),
        pipeline,
        mtp_apart=mtp_apart,
        source=profile.origin.source,
        limit_bytes=limit_bytes,
        recompute=recompute,
        gpt=gpt,
    )
    return plan, profile
