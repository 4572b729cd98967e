"""The layout of a pipeline for given numbers of stages and of model chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evenpipe.descriptions import framework
from evenpipe.fitting.document import FitError
from evenpipe.fitting.source import source_of_settings
from evenpipe.fitting.weighing import Weighing
from evenpipe.planner.possible import check
from evenpipe.planner.run import EstimateError
from evenpipe.recipes.megatron import kinds_of, layout_of
from evenpipe.recipes.provider import settings_of
from evenpipe.recipes.surroundings import in_megatron
from evenpipe.settings.spelling import in_flags

__all__ = ["layout_for"]

#: Settings that say how layers are divided; the layout replaces them.
_DIVIDING = (
    *("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def layout_for(
    settings: Any, stages: int, chunks: int | None, on: str | None = None, memory_gib: float | None = None
) -> list[list[str]]:
    """Return the kinds of layers of each part: the faster of even parts and of parts that make stages equally fast.

    If only one of them fits the memory, that one; if neither does, the one that needs less. Raises FitError where no
    layout has a layer for each part.
    """
    given = settings_of(settings)
    sizes = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": chunks or 1}
    values = {name: value for name, value in given.values.items() if name not in _DIVIDING} | sizes
    source = source_of_settings(given._replace(values=values), on, memory_gib)
    model, of = source.found.model, framework("megatron")
    run = source.found.run.of(of)
    parts = run.stages * run.chunks
    weighing = Weighing(model, source.cluster, of, lambda _: True)
    tried = [weighing.levelled(run)]
    if model.layers % parts == 0:
        tried.append(replace(run, layout=(model.layers // parts,) * parts))
    found = [one for one in map(weighing.planned, tried) if one is not None and one.run.layout is not None]
    if not found:
        try:
            check(run, model, source.cluster)
        except EstimateError as error:
            raise FitError(in_megatron(in_flags(error))) from None
        raise FitError(f"--pipeline-model-parallel-size {stages}: no layout of {model.layers} layers has {parts} parts")
    fitting = [one for one in found if one.estimate.fits]
    best = (
        min(fitting, key=lambda one: one.estimate.iteration_ms)
        if fitting
        else min(found, key=lambda one: one.most_bytes)
    )
    layout = layout_of(model, best.run)
    assert layout is not None
    return kinds_of(layout, model.layers, stages)
