"""Backwards in two halves in megatron-core: its linear layers leave the gradients of their weights for the second.

What is no linear layer (norms, biases, embeddings, routers) has its gradients in the first half: a few per cent of the
time.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenpipe.megatron.supported import MEGATRON_CORE, since
from evenpipe.megatron.symbols import WEIGHT_GRADIENTS
from evenpipe.runtime.weight_gradients import MARK
from evenpipe.upstream import PRESENT, Patch, PatchSet

__all__ = ["linear_layers", "linear_weights"]

_LINEAR: Final = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"


def linear_weights(chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the weights of linear layers that no other module of `chunk` has.

    A weight that is another module's too, such as an embedding's, stays in the first half: its gradients are one sum.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    others = [one for one in chunk.modules() if not isinstance(one, ColumnParallelLinear | RowParallelLinear)]
    theirs = {id(weight) for one in others for weight in one.parameters(recurse=False)}
    return [one for one in chunk.parameters() if id(one) not in theirs]


def linear_layers() -> PatchSet:
    """The patch under which weights that `WeightGradients` have marked leave their products to them."""
    patch = Patch(
        name="linear layers",
        targets=(_LINEAR,),
        distribution=MEGATRON_CORE,
        versions=since(PRESENT),
        replacement=_in_halves,
        reason="one autograd function computes the gradients of inputs and weights, and no release can leave one out",
        rebinds=True,
    )
    return PatchSet("backwards in halves", [patch], WEIGHT_GRADIENTS)


def _in_halves(whole: Any) -> Any:
    """`whole`, Megatron's autograd function of a linear layer, with the weight left out where it is marked."""
    from megatron.core.tensor_parallel import layers

    class InputGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, taken: Tensor, bias: Tensor | None, weight: _Beside, *rest: Any) -> Tensor:
            ctx.weight, ctx.rest = weight.parameter, len(rest)
            ctx.autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            return cast(Tensor, whole.forward(ctx, taken, weight.parameter, bias, *rest))

        @staticmethod
        @layers.custom_bwd  # type: ignore[untyped-decorator]
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Any:
            taken, _ = ctx.saved_tensors
            weight = ctx.weight
            getattr(weight, MARK).add(weight, [taken, gradient], partial(_product, weight, _Linear.of(ctx)))
            of_bias = _flat(gradient, gradient)[0].sum(dim=0) if ctx.use_bias else None
            return _of_input(ctx, taken, weight, gradient), of_bias, None, *[None] * ctx.rest

    class Linear(whole):  # type: ignore[misc]
        @classmethod
        def apply(cls, taken: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
            buffer, shards = rest[3], rest[6:]  # of gathered weights, from 0.19 on
            left = torch.is_grad_enabled() and taken.requires_grad and hasattr(weight, MARK)
            if not left or shards > (1,) or buffer is not None:
                return whole.apply(taken, weight, bias, *rest)
            return InputGradient.apply(taken, bias, _Beside(weight), *rest)  # type: ignore[no-untyped-call]

    return Linear


class _Beside(NamedTuple):
    """A parameter that autograd is not shown."""

    parameter: Any


class _Linear(NamedTuple):
    """How a linear layer is computed, from the context of its autograd function."""

    sequence_parallel: bool
    group: Any
    fused: bool
    main_grad: Tensor | None
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def of(cls, ctx: Any) -> _Linear:
        fused, main_grad = ctx.gradient_accumulation_fusion, ctx.main_grad
        return cls(ctx.sequence_parallel, ctx.tp_group, fused, main_grad, ctx.autocast)


def _of_input(ctx: Any, taken: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of the input, reduced among tensor-parallel ranks as Megatron does it."""
    from megatron.core.tensor_parallel import layers

    found = gradient.matmul(weight)
    if ctx.allreduce_dgrad:
        torch.distributed.all_reduce(found, group=ctx.tp_group)
    if not ctx.sequence_parallel:
        return found
    part = torch.empty_like(taken, requires_grad=False)
    layers.dist_reduce_scatter_func(part, found, group=ctx.tp_group)
    return part


def _product(weight: Any, linear: _Linear, taken: Tensor, gradient: Tensor) -> Tensor | None:
    """The gradient of `weight` by one use; where Megatron's kernel adds it to `main_grad`, what Megatron gives then."""
    enabled, dtype = linear.autocast
    with torch.autocast("cuda", dtype, enabled):
        return _multiplied(weight, linear, taken, gradient)


def _multiplied(weight: Any, linear: _Linear, taken: Tensor, gradient: Tensor) -> Tensor | None:
    from megatron.core.tensor_parallel import layers

    if linear.sequence_parallel:
        shape = [taken.size(0) * linear.group.size(), *taken.shape[1:]]
        whole = torch.empty(shape, dtype=taken.dtype, device=taken.device)
        layers.dist_all_gather_func(whole, taken, group=linear.group)
        taken = whole
    gradient, taken = _flat(gradient, taken)
    if not linear.fused:
        return gradient.t().matmul(taken)
    assert linear.main_grad is not None, "Megatron fuses into it"
    kernels = import_module("fused_weight_gradient_mlp_cuda")  # Apex's
    fuse = kernels.wgrad_gemm_accum_fp32 if linear.main_grad.dtype == torch.float32 else kernels.wgrad_gemm_accum_fp16
    weight.main_grad = linear.main_grad
    fuse(taken, gradient, weight.main_grad)
    return _placeholder(weight, taken.dtype)


def _placeholder(weight: Any, dtype: torch.dtype) -> Tensor | None:
    """Return a stand-in for a gradient in `main_grad`, so that hooks run where they do; None where nobody asks."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=dtype, device=weight.device)


def _flat(gradient: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    from megatron.core.tensor_parallel import layers

    found: tuple[Tensor, Tensor] = layers.prepare_input_tensors_for_wgrad_compute(gradient, taken)
    return found
