"""What of DeepSpeed does not go together with 2BW, said in one line."""

from __future__ import annotations

from typing import Any

from evenpipe.deepspeed.section import SectionError
from evenpipe.deepspeed.two_buffered.gradients import Gradients

__all__ = ["refuse_for_two_buffered"]


def refuse_for_two_buffered(engine: Any, gradients: Gradients | None) -> None:
    """Raise SectionError for the first setting of an initialized engine that 2bw cannot honour."""
    for broken, line in (
        (
            engine.is_model_parallel,
            "a topology with model parallelism is not available with 2bw: use data and pipeline parallelism only",
        ),
        (
            gradients is None,
            f"the optimizer {type(engine.optimizer).__name__} with these settings is not available with 2bw: use Adam "
            'or SGD, ZeRO 0 or 1, no offloading, and in fp16 no other "grad_accum_dtype"',
        ),
        (
            engine.has_moe_layers
            or getattr(engine, "torch_autocast_z0_gradscaler", None) is not None
            or getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None,
            "layers of experts and gradient scaling under torch_autocast are not available with 2bw: leave them out",
        ),
        (
            engine.module.dynamic_shape,
            "PipelineModule(dynamic_shape=True) is not available with 2bw: pad micro-batches, or leave it out",
        ),
    ):
        if broken:
            raise SectionError("schedule", line)
