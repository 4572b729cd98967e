"""What of DeepSpeed does not go together with 2BW, said in one line."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.module import PipelineModule

from evenpipe.deepspeed.section import SectionError
from evenpipe.deepspeed.two_buffered.gradients import Gradients, PlainGradients, ShardedGradients

__all__ = ["refuse_for_two_buffered"]


def refuse_for_two_buffered(engine: Any, gradients: Gradients | None) -> None:
    """Raise SectionError for the first setting of an initialized engine that 2bw cannot honour."""
    for broken, line in (
        (
            engine.is_model_parallel,
            "a topology with model parallelism is not available with 2bw: use data and pipeline parallelism only",
        ),
        (
            engine.fp16_enabled(),
            "fp16 is not available with 2bw yet: use bf16, or fp32",
        ),
        (
            gradients is None,
            f"the optimizer {type(engine.optimizer).__name__} with these settings is not available with 2bw: use fp32 "
            "or bf16, ZeRO 0 or 1, and no offloading",
        ),
        (
            engine.has_moe_layers or getattr(engine, "torch_autocast_z0_gradscaler", None) is not None,
            "layers of experts and gradient scaling under torch_autocast are not available with 2bw: leave them out",
        ),
        (
            isinstance(gradients, PlainGradients) and engine.gradient_clipping() > 0,
            f"gradient_clipping {engine.gradient_clipping()} in fp32 without ZeRO is not available with 2bw: set it to "
            "0, or use ZeRO-1 or bf16",
        ),
        (
            isinstance(gradients, ShardedGradients) and bool(engine.module.get_tied_weights_and_groups()),
            "tied layers with ZeRO-1 are not available with 2bw yet: use ZeRO-0, or bf16 with "
            '"data_types": {"grad_accum_dtype": "fp32"}',
        ),
        (
            engine.module.dynamic_shape,
            "PipelineModule(dynamic_shape=True) is not available with 2bw: pad micro-batches, or leave it out",
        ),
        (
            type(engine.module).get_additional_losses is not PipelineModule.get_additional_losses,
            "get_additional_losses is not available with 2bw yet: leave it out",
        ),
    ):
        if broken:
            raise SectionError("schedule", line)
