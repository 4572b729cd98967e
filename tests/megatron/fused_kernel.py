"""Apex's kernel that adds a weight's gradient to its `main_grad`, as torch operations: Megatron imports it by name."""

import sys
from types import ModuleType

from torch import Tensor

NAME = "fused_weight_gradient_mlp_cuda"


def install() -> None:
    """Have Megatron find it. Call this before anything of megatron.core is imported."""
    kernel = ModuleType(NAME)
    kernel.wgrad_gemm_accum_fp32 = kernel.wgrad_gemm_accum_fp16 = _accumulate  # type: ignore[attr-defined]
    sys.modules[NAME] = kernel


def _accumulate(inputs: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
    """inputs (tokens, in), gradient (tokens, out), main_grad (out, in)"""
    main_grad.add_(gradient.t().matmul(inputs))
