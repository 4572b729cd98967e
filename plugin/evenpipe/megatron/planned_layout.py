"""A planned layout in Megatron: patches under which it builds half layers, and computes as many again as planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from evenpipe.megatron.supported import core_patch
from evenpipe.partition.layouts.written import WrittenLayout
from evenpipe.upstream import PatchSet

__all__ = ["half_layers"]


def half_layers(plan: WrittenLayout) -> PatchSet:
    """The patches under which models whose configuration has the plan's layout are cut as it says, inside layers too,
    and each stage computes as many layers again as it is planned to.

    For scripts that make their own TransformerConfig::

        plan = WrittenLayout.read(Path("P.json"))
        half_layers(plan).apply()
        config = TransformerConfig(..., pipeline_model_parallel_layout=plan.layout)
    """
    with_halves, build = functools.partial(_with_halves, plan), functools.partial(_build, plan)
    transformer = "megatron.core.transformer"
    patches = [
        core_patch(
            "layout",
            f"{transformer}.transformer_config:TransformerConfig.__post_init__",
            with_halves,
            "a layout has whole layers only",
            "(self)",
        ),
        core_patch(
            "layers",
            f"{transformer}.transformer_block:TransformerBlock._build_layers",
            build,
            "a stage has whole layers only, whose weights it draws itself",
            "(self)",
        ),
    ]
    return PatchSet("halves", patches)


def _with_halves(plan: WrittenLayout, original: Callable[[Any], None], config: Any) -> None:
    original(config)
    if str(config.pipeline_model_parallel_layout) == plan.layout:
        if (difference := plan.unlike(config)) is not None:
            raise ValueError(f"pipeline_model_parallel_layout={plan.layout}: {difference}")
        from evenpipe.megatron.half_layers import HalvedLayout

        stages = config.pipeline_model_parallel_size
        config.pipeline_model_parallel_layout = HalvedLayout(plan.layout, stages, plan.halves)


def _build(plan: WrittenLayout, original: Callable[[Any], None], block: Any) -> None:
    from evenpipe.megatron.half_layers import HalvedLayout, build_halves

    if isinstance(block.config.pipeline_model_parallel_layout, HalvedLayout):
        _recompute(plan, block.config)
        build_halves(original, block)
    else:
        original(block)


def _recompute(plan: WrittenLayout, config: Any) -> None:
    """What `--recompute-method block` would say of this stage alone; each rank has its own configuration."""
    from megatron.core import parallel_state

    layers = plan.stages[parallel_state.get_pipeline_model_parallel_rank()].recompute_layers
    if layers:
        config.recompute_granularity, config.recompute_method = "full", "block"
        config.recompute_num_layers = layers
