"""What of DeepSpeed cannot be honoured, or does not work in DeepSpeed itself, said in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.section import SectionError
from evenpipe.runtime.device_queues import ONE_QUEUE, one_queue

__all__ = ["refuse_configuration", "refuse_unsupported"]


class _Rule(NamedTuple):
    broken: bool
    line: str


def refuse_configuration(config: Mapping[str, Any]) -> None:
    """Raise SectionError for a configuration for which DeepSpeed makes no pipeline engine."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if stage not in (0, 1):
        raise SectionError("", f"zero_optimization.stage {stage}: DeepSpeed's pipelines work with 0 and 1 only: use 1")


def refuse_unsupported(engine: Any) -> None:
    """Raise SectionError for the first setting of an initialized engine that EvenPipe cannot honour; warn of others."""
    for rule in _rules(engine):
        if rule.broken:
            raise SectionError("", rule.line)
    if not engine.evenpipe.streams:  # which has a norm, and losses scaled, of its own
        for warning in _warnings(engine):
            print_once(f"warning: {warning}")


def _warnings(engine: Any) -> Iterator[str]:
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


def _rules(engine: Any) -> tuple[_Rule, ...]:
    saving = engine._config.activation_checkpointing_config
    hiding = [
        option
        for option in ("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing")
        if getattr(saving, option, False)
    ]
    return (
        _Rule(engine.num_stages < 2, "one stage is no pipeline: give PipelineModule at least 2, or leave it out"),
        _Rule(
            engine.evenpipe.bpipe and engine.module.dynamic_shape,
            "bpipe evicts micro-batches of one size, not those of PipelineModule(dynamic_shape=True): pad them to one "
            "size, or leave one of the two out",
        ),
        _Rule(
            engine.is_pipe_partitioned or engine.is_grad_partitioned,
            "activations that are cut up among the ranks of a model-parallel stage are not available: set "
            '"pipeline": {"pipe_partitioned": false, "grad_partitioned": false}',
        ),
        _Rule(
            engine.evenpipe.in_groups and one_queue(engine.device.type, os.environ),
            f"group_size {engine.evenpipe.group_size}: {ONE_QUEUE}",
        ),
        _Rule(
            engine.wall_clock_breakdown(),
            "wall_clock_breakdown: its timers do not work in DeepSpeed's pipelines: leave one of them out",
        ),
        _Rule(
            engine.evenpipe.bpipe and bool(hiding),
            f"activation_checkpointing.{hiding[0] if hiding else ''}: moves what bpipe would evict: leave one of them "
            "out",
        ),
    )
