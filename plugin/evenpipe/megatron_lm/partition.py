"""--evenpipe-partition: a planned layout among Megatron's arguments, or why the plan is not for them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenpipe.megatron_lm.flags import ArgumentError, config_from
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import flag

if TYPE_CHECKING:
    from evenpipe.layouts.written import WrittenLayout

__all__ = ["check_vocabulary", "lay_out", "layer_kinds", "planned"]


def lay_out(args: Namespace) -> None:
    """Before Megatron validates its `args`: give them the planned layout. Raises ArgumentError if it does not fit."""
    config = config_from(args)
    if (plan := _read(config)) is None:
        return
    if (difference := plan.difference(args)) is not None:
        raise _refused(config, difference)
    args.pipeline_model_parallel_layout = plan.layout


def planned(config: EvenPipeConfig, args: Namespace) -> WrittenLayout | None:
    """Return the plan whose layout validated `args` have; None where none is asked for. Raises ArgumentError."""
    if (plan := _read(config)) is None:
        return None
    if str(getattr(args, "pipeline_model_parallel_layout", None)) != plan.layout:
        raise _refused(config, "--yaml-cfg: its parser knows of no layouts: give Megatron's flags instead")
    schedule = config.spec.name
    if schedule == "1f1b":
        schedule = plan.pipeline.schedule
    if schedule != plan.schedule:
        raise _refused(
            config, f"the plan is for the schedule {plan.schedule}, not {schedule}: use that, or {flag('bpipe')}"
        )
    return plan


def check_vocabulary(config: EvenPipeConfig, args: Namespace) -> None:
    """Once the tokenizer is made, which may be the first to know its size. Raises ArgumentError."""
    if (plan := _read(config)) is not None and (line := plan.other_vocabulary(args.padded_vocab_size)) is not None:
        raise _refused(config, line)


def _read(config: EvenPipeConfig) -> WrittenLayout | None:
    if config.partition is None:
        return None
    assert isinstance(config.partition, Path)
    # Imported here: a run without a plan does not pay for it.
    from evenpipe.layouts.gpt import LayoutError
    from evenpipe.layouts.written import WrittenLayout

    try:
        return WrittenLayout.read(config.partition)
    except LayoutError as error:
        raise ArgumentError(f"{flag('partition')} {error}") from None


def _refused(config: EvenPipeConfig, why: str) -> ArgumentError:
    return ArgumentError(f"{flag('partition')} {config.partition}: {why}")


def layer_kinds(args: Namespace) -> list[list[str]] | None:
    """Return the layer kinds of each part, in the model's order, by the pipeline layout in `args`; None without one."""
    layout: Any = getattr(args, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str):
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        layout = PipelineParallelLayerLayout.parse_str_to_list(layout)
    return layout and [[getattr(kind, "name", kind) for kind in part] for part in layout]
