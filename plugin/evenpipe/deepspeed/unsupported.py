"""What of DeepSpeed cannot be honoured, or does not work in DeepSpeed itself, said in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.section import Section, SectionError
from evenpipe.runtime.exchange import gather
from evenpipe.settings.contradictions import one_group
from evenpipe.settings.spelling import SECTION

__all__ = [
    "moved_anyway",
    "refuse_configuration",
    "refuse_for_one_stage",
    "refuse_for_two_bw",
    "refuse_uneven_experts",
    "refuse_unsupported",
    "said_of_one_stage",
]


def refuse_configuration(config: Mapping[str, Any]) -> None:
    """Raise SectionError for a configuration for which DeepSpeed makes no pipeline engine."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if stage not in (0, 1):
        raise SectionError("", f"zero_optimization.stage {stage}: DeepSpeed's pipelines work with 0 and 1 only: use 1")


def refuse_uneven_experts(module: Any) -> None:
    """Raise SectionError, on rank 0, where not all stages have experts of the same groups; all ranks call it.

    DeepSpeed makes the groups where a stage has such layers, and waits there for all ranks of the job.
    """
    from deepspeed.moe.layer import MoE  # here, as `evenpipe fit` reads configurations without DeepSpeed

    names = sorted({layer.expert_group_name for layer in module.modules() if isinstance(layer, MoE)})
    groups = {stage: tuple(found) for stage, found in gather([module.stage_id, names]) or ()}
    if len(set(groups.values())) > 1:
        said = ", ".join(f"stage {stage} {' and '.join(found) or 'none'}" for stage, found in sorted(groups.items()))
        raise SectionError(
            "",
            f"layers of experts ({said}): DeepSpeed waits forever at its start unless all stages have some, of the "
            'same ep_size: cut the model so, by "partition"',
        )


def refuse_for_one_stage(section: Section) -> None:
    """Raise SectionError for the first setting that DeepSpeed's own engine of one stage would train otherwise."""
    if isinstance(section.partition, Path):
        raise SectionError(
            "partition",
            f"{section.partition}: is carried out by two stages or more, and PipelineModule has 1: give it as many as "
            "the plan, or leave partition out",
        )
    if section.streams:
        raise SectionError(
            "schedule",
            f'"{section.schedule}": trains by a rule of its own, for two stages or more, and PipelineModule has 1: '
            "give it more, or leave schedule out",
        )


def said_of_one_stage(section: Section) -> None:
    """Print once, for a section that `refuse_for_one_stage` accepts, what has become of its settings."""
    unused = ", ".join(section.model_dump(exclude_defaults=True))
    print_once(
        "PipelineModule has one stage: DeepSpeed's own engine trains it"
        + (f", and nothing comes of the section's {unused}" if unused else "")
    )


def refuse_unsupported(engine: Any) -> None:
    """Raise SectionError for the first setting of an initialized engine that EvenPipe cannot honour; warn of others."""
    _refuse_first("", _unsupported(engine))
    if not engine.evenpipe.streams:  # which has a norm, and losses scaled, of its own
        for warning in _warnings(engine):
            print_once(f"warning: {warning}")


def _warnings(engine: Any) -> Iterator[str]:
    section = engine.evenpipe
    if (line := one_group(section.spec, section.group_size, engine.micro_batches, SECTION)) is not None:
        yield line
    in_fp32 = not (engine.bfloat16_enabled() or engine.fp16_enabled())
    if in_fp32 and engine.gradient_clipping() > 0:
        yield (
            f"gradient_clipping {engine.gradient_clipping()}: in fp32 DeepSpeed's norm counts the parameters of the "
            "first stage only, with or without EvenPipe: use bf16, or clip nothing"
        )
    if engine.fp16_enabled() and not engine.zero_optimization() and engine.optimizer.loss_scale != 1:
        yield (
            "fp16 without ZeRO: DeepSpeed divides gradients by the loss scale and does not multiply losses by it, with "
            'or without EvenPipe: use "zero_optimization": {"stage": 1}, or bf16'
        )


def refuse_for_two_bw(engine: Any, gradients: object | None) -> None:
    """Raise SectionError for the first setting of an initialized engine that 2bw cannot honour.

    `gradients` are those of its optimizer; None for a kind that is not known.
    """
    missing = _not_with_two_bw(engine, gradients)
    _refuse_first(
        "schedule", (f"{what} not available with 2bw, which {why}: {remedy}" for what, why, remedy in missing)
    )


def _refuse_first(path: str, lines: Iterable[str]) -> None:
    for line in lines:
        raise SectionError(path, line)


def _unsupported(engine: Any) -> Iterator[str]:
    if engine.is_pipe_partitioned or engine.is_grad_partitioned:
        yield (
            "activations that are cut up among the ranks of a model-parallel stage are not available: set "
            '"pipeline": {"pipe_partitioned": false, "grad_partitioned": false}'
        )
    if engine.cut is not None:
        yield from _not_with_a_plan(engine)
    if engine.wall_clock_breakdown():
        yield "wall_clock_breakdown: its timers do not work in DeepSpeed's pipelines: leave one of them out"
    for setting in ("bpipe", "swap"):
        for option in moved_anyway(engine) if getattr(engine.evenpipe, setting) else ():
            yield f"activation_checkpointing.{option}: moves what {setting} would move: leave one of them out"


def moved_anyway(engine: Any) -> Iterator[str]:
    """Yield the options of activation checkpointing that move what BPipe would evict, or a swap take to the host."""
    for option in ("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing"):
        if getattr(engine._config.activation_checkpointing_config, option, False):
            yield option


def _not_with_a_plan(engine: Any) -> Iterator[str]:
    path = engine.evenpipe.partition
    if engine.evenpipe.swap is not None:
        yield f"partition {path}: what is swapped is the plan's to say: leave swap out, or the plan"
    if engine.module.activation_checkpoint_interval:
        yield (
            f"partition {path}: what is computed again is the plan's to say: leave activation_checkpoint_interval out, "
            "and make the plan with --optimize recompute"
        )
    if engine.torch_autocast_enabled():
        yield f"partition {path}: the plan's operations have types of their own: leave torch_autocast out"


def _not_with_two_bw(engine: Any, gradients: object | None) -> Iterator[tuple[str, str, str]]:
    """Yield what is not available with 2bw, the property of 2bw that is the reason, and the remedy."""
    if gradients is None:
        yield (
            f"the optimizer {type(engine.optimizer).__name__} with these settings is",
            "does not know where it keeps the gradients that wait for their step",
            'use ZeRO 0 or 1 with any torch optimizer, no offloading, and in fp16 no other "grad_accum_dtype"',
        )
    if engine.has_moe_layers and engine.is_model_parallel and getattr(gradients, "sharded", False):
        yield (
            "a topology with model parallelism is, beside layers of experts and with this ZeRO optimizer,",
            "takes its norm, which leaves out experts of all model-parallel ranks but the first",
            'use ZeRO 0, or "bf16" with "grad_accum_dtype": "fp32"',
        )
    layers = engine.module.modules() if engine.has_moe_layers and engine.is_model_parallel else ()
    if any(getattr(layer, "enable_expert_tensor_parallelism", False) for layer in layers):
        yield (
            "MoE(enable_expert_tensor_parallelism=True) is, in a topology with model parallelism,",
            "counts in the norm, and saves, what the first model-parallel rank has of an expert that is cut among them",
            "leave it out, or use another schedule",
        )
    scalers = (engine, "torch_autocast_z0_gradscaler"), (engine.optimizer, "torch_autocast_gradscaler")
    if any(getattr(owner, name, None) is not None for owner, name in scalers):
        yield (
            "gradient scaling under torch_autocast is",
            "finishes a step when the next batch has been scaled, and that scaler has one scale for both",
            'use "bf16", "fp16", or torch_autocast with bfloat16',
        )
