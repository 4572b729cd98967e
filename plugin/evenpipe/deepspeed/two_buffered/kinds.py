"""Which kind of gradients each of DeepSpeed's optimizers has."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from evenpipe.deepspeed.two_buffered.flat_gradients import FlatGradients
from evenpipe.deepspeed.two_buffered.gradients import Gradients
from evenpipe.deepspeed.two_buffered.plain_gradients import HalfGradients, PlainGradients
from evenpipe.deepspeed.two_buffered.sharded_gradients import ShardedGradients

__all__ = ["gradients_of"]


def gradients_of(engine: Any) -> Gradients | None:
    """Those of `engine`'s optimizer; None for a kind that is not known here."""
    optimizer, parameters = engine.optimizer, engine.module.parameters()
    if isinstance(optimizer, BF16_Optimizer):
        return FlatGradients(optimizer) if optimizer.using_real_optimizer else None
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        beside = optimizer.cpu_offload or optimizer.use_grad_accum_attribute
        return None if beside else ShardedGradients(optimizer, parameters)
    if isinstance(optimizer, FP16_Optimizer):
        return None if optimizer.fused_adam_legacy else HalfGradients(optimizer, parameters)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return None if optimizer.fused_lamb_legacy else HalfGradients(optimizer, parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        return PlainGradients(parameters, engine.gradient_clipping())
    return None
