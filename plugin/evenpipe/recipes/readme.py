"""The README of a recipe: what it is predicted to need and to reach, and what would change that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple, get_args

from evenpipe.planner.run import EstimateError, Recompute, Run
from evenpipe.recipes.recipe import Recipe
from evenpipe.recipes.rendering import render
from evenpipe.schedule import ScheduleError, choose

__all__ = ["readme_of"]

_GIB: Final = 2**30


class _Change(NamedTuple):
    """One thing done otherwise: what it costs, or why it cannot be. ``times``: its time over that of the recipe."""

    what: str
    iteration_ms: float
    times: float
    most_gib: float
    fits: bool


def _layers(recipe: Recipe) -> list[str]:
    """Layers of each stage, those of its chunks apart: the first chunks of all stages come first."""
    run = recipe.estimate.run
    parts = run.layers_of(recipe.model)
    return [" + ".join(map(str, parts[stage :: run.stages])) for stage in range(run.stages)]


def _ranks(recipe: Recipe, stage: int) -> str:
    """Return the ranks of the stage's first replica by Megatron's and DeepSpeed's order, and their node."""
    run, gpus_per_node = recipe.estimate.run, recipe.cluster.gpus_per_node
    inner = run.tensor * run.context
    first = stage * inner * (1 if run.placement == "pipeline" else run.data)
    last = first + inner - 1
    node, other = first // gpus_per_node, last // gpus_per_node
    said = f"{first}" if inner == 1 else f"{first} to {last}"
    return f"{said}, node {node}" if node == other else f"{said}, nodes {node} to {other}"


def _changes(recipe: Recipe) -> list[_Change]:
    """One after the other, those that can be."""
    usual = recipe.estimate.iteration_ms / recipe.run.global_batch
    found = []
    for what, run in _otherwise(recipe):
        try:
            shown = recipe.estimator(run)
        except (EstimateError, ScheduleError):
            continue
        most = max(stage.bytes.total for stage in shown.stages) / _GIB
        times = shown.iteration_ms / run.global_batch / usual
        found.append(_Change(what, shown.iteration_ms, times, most, shown.fits))
    return found


def _otherwise(recipe: Recipe) -> Iterator[tuple[str, Run]]:
    run = recipe.run
    scopes = [scope for scope in get_args(Recompute) if recipe.framework == "megatron" or scope != "selective"]
    if run.stages >= 4 and run.spec.balanced is not None:
        yield "without BPipe" if run.bpipe else "with BPipe", replace(run, bpipe=not run.bpipe)
    for scope in scopes:
        if scope != run.recompute:
            yield f"recomputing {_SCOPES[scope]}", replace(run, recompute=scope, recomputed_layers=None)
    for size in (run.micro_batch // 2, run.micro_batch * 2):
        if size:
            yield f"micro-batches of {size}", replace(run, micro_batch=size)
    if run.stages > 1:
        yield from _schedules(run)
    for times, said in ((0.5, "half"), (2, "twice")):
        batch = int(run.global_batch * times)
        if batch:
            yield f"{said} the samples of an iteration ({batch:,})", replace(run, global_batch=batch)


_SCOPES: Final = {"none": "nothing", "selective": "attention's core only", "full": "whole layers"}


def _schedules(run: Run) -> Iterator[tuple[str, Run]]:
    for name, size in (("1f1b", 1), ("kfkb", 2), ("2bw", 1)):
        if name == run.schedule or run.chunks > 1 or (name == "2bw" and run.micro_batches < run.stages):
            continue
        bpipe = run.bpipe and choose(name).balanced is not None
        late = " (gradients a batch late: other training)" if name == "2bw" else ""
        other = replace(run, schedule=name, group_size=size, bpipe=bpipe)
        yield f"schedule {name}{f', groups of {size}' if size > 1 else ''}{late}", other


def readme_of(recipe: Recipe) -> str:
    return render(
        "README.md",
        recipe=recipe,
        sizes=_sizes(recipe),
        gib=recipe.estimate.fullest_gib(recipe.cluster.device),
        layers=_layers(recipe),
        ranks=[_ranks(recipe, stage) for stage in range(recipe.estimate.run.stages)],
        changes=_changes(recipe),
    )


def _sizes(recipe: Recipe) -> str:
    run, model = recipe.run, recipe.model
    division = [f"tensor {run.tensor}", f"pipeline {run.stages}", f"data {run.data}"]
    division += [f"context {run.context}"] * (run.context > 1) + [f"expert {run.expert}"] * (run.expert > 1)
    schedule = f"{run.spec.name}{f' with {run.chunks} chunks a stage' if run.chunks > 1 else ''}"
    schedule += f" in groups of {run.group_size}" if run.group_size > 1 else ""
    return (
        f"{model.layers} layers of {model.hidden:,}, {model.sequence:,} tokens a sample; {recipe.cluster.gpus} GPUs as "
        f"{' × '.join(division)}; {run.micro_batches} micro-batches of {run.micro_batch}; schedule {schedule}"
        f"{' with BPipe' if run.bpipe else ''}; {run.precision}, recomputing {run.recomputing}."
    )
