"""A planned layout in Megatron: patches under which it builds half layers, and computes as many again as planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from evenpipe.layouts.written import WrittenLayout
from evenpipe.megatron.supported import PARALLEL_STATE, Changes, core_patch, expected, members
from evenpipe.megatron.symbols import RANDOM_NUMBERS
from evenpipe.upstream import PRESENT, PatchSet

__all__ = ["half_layers"]

_TRANSFORMER: Final = "megatron.core.transformer"
_LAYOUT: Final = f"{_TRANSFORMER}.pipeline_parallel_layer_layout:PipelineParallelLayerLayout"
_BLOCK: Final = f"{_TRANSFORMER}.transformer_block:TransformerBlock"
_CONFIG: Final = f"{_TRANSFORMER}.transformer_config:TransformerConfig"
_CALLED: Final[dict[str, Changes]] = {
    _LAYOUT: "(layout, pipeline_model_parallel_size)",
    **members(_LAYOUT, ("get_num_layers_to_build", "get_layer_offset", "pipeline_model_parallel_size")),
    f"{_TRANSFORMER}.enums:LayerType.decoder": PRESENT,
    f"{_TRANSFORMER}.spec_utils:ModuleSpec": {
        "0.14": "(module, params=<factory>, submodules=None)",
        "0.16": "(module, params=<factory>, submodules=None, metainfo=<factory>)",
    },
    f"{_TRANSFORMER}.spec_utils:get_module": "(spec_or_module, **additional_kwargs)",
    f"{_BLOCK}.vp_stage": PRESENT,
    f"{PARALLEL_STATE}:get_pipeline_model_parallel_group": "(check_initialized=True)",
    **members(
        PARALLEL_STATE, [f"get_pipeline_model_parallel_{what}" for what in ("rank", "next_rank", "prev_rank")], "()"
    ),
}
_AS_PLANNED: Final = "a plan may cut inside layers, and have each stage recompute as many layers as it is planned to"
_ASSIGNED: Final = {
    **members(_BLOCK, ("submodules", "final_layernorm")),
    **members(
        _CONFIG,
        ("pipeline_model_parallel_layout", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    ),
}


def half_layers(plan: WrittenLayout) -> PatchSet:
    """The patches under which models whose configuration has the plan's layout are cut as it says, inside layers too,
    and each stage computes as many layers again as it is planned to.

    For scripts that make their own TransformerConfig::

        plan = WrittenLayout.read(Path("P.json"))
        half_layers(plan).apply()
        config = TransformerConfig(..., pipeline_model_parallel_layout=plan.layout)
    """
    with_halves, build = functools.partial(_with_halves, plan), functools.partial(_build, plan)
    patches = [
        core_patch(
            "layout",
            f"{_CONFIG}.__post_init__",
            with_halves,
            "a layout has whole layers only",
            "(self)",
        ),
        core_patch(
            "layers",
            f"{_BLOCK}._build_layers",
            build,
            "a stage has whole layers only, whose weights it draws itself",
            "(self)",
        ),
    ]
    return PatchSet("halves", patches, [*RANDOM_NUMBERS, *expected(_CALLED), *expected(_ASSIGNED, _AS_PLANNED)])


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
    """Set what `--recompute-method block` would set for this stage alone; each rank has its own configuration."""
    from megatron.core import parallel_state

    layers = plan.stages[parallel_state.get_pipeline_model_parallel_rank()].recompute_layers
    if layers:
        config.recompute_granularity, config.recompute_method = "full", "block"
        config.recompute_num_layers = layers
