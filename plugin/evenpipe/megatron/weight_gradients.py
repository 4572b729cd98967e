"""Backwards in two halves in megatron-core: what the first leaves of its linear layers for the second.

The first half computes the gradients of inputs, which a stage waits for; the second the products that are the weights'
gradients (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, §2). What is no linear layer (norms, biases, embeddings,
routers) has its gradients in the first half: a few per cent of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evenpipe.megatron.supported import MEGATRON_CORE, since
from evenpipe.megatron.symbols import WEIGHT_GRADIENTS
from evenpipe.runtime import streams
from evenpipe.schedule import Unit
from evenpipe.upstream import PRESENT, Patch, PatchSet

__all__ = ["WeightGradients", "delaying_layers", "linear_layers", "whole_layers"]

_LINEAR: Final = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"
#: On a parameter, while a batch whose backwards are in halves is under way.
_MARK: Final = "evenpipe_weight_gradients"


class _Use(NamedTuple):
    """One use of a weight in a first half: what its gradient is the product of."""

    weight: torch.nn.Parameter
    taken: Tensor
    gradient: Tensor
    linear: Any
    stream: streams.Stream


class WeightGradients:
    """The second halves of the backwards of one model chunk.

    Between `begin` and `end` its linear layers leave their weights out of autograd's graph, so that a backward neither
    computes their gradients nor runs the hooks on them. A second half is a backward of its own, through one node a
    weight: gradients are accumulated, and hooks of data parallelism run, as a whole backward has it.

    A weight that is another module's of the chunk too, such as an embedding's, stays in the first half: its gradients
    are one sum.
    `recording(unit)` is entered to save what a second half needs, so that it is counted.

    Layers that were made with delayed gradients (Transformer Engine's, `delay_wgrad_compute`) have queues of their own,
    first in, first out, which are not counted.
    """

    def __init__(self, chunk: torch.nn.Module, recording: Callable[[Unit], AbstractContextManager[object]]) -> None:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        others = [one for one in chunk.modules() if not isinstance(one, ColumnParallelLinear | RowParallelLinear)]
        theirs = {id(weight) for one in others for weight in one.parameters(recurse=False)}
        self._weights = [one for one in chunk.parameters() if one.requires_grad and id(one) not in theirs]
        self._recording = recording
        self._uses: list[_Use] | None = None
        self._left: dict[Unit, list[Tensor]] = {}
        self._layers: list[Any] = [one for one in chunk.modules() if _delays(one)][::-1]  # as a backward comes to them
        self._queued: dict[Unit, list[int]] = {}

    def begin(self) -> None:
        """Before a batch. Raises ValueError for a weight that two chunks of a stage share."""
        for weight in self._weights:
            if hasattr(weight, _MARK):
                raise ValueError("two model chunks of a stage share a weight: take a schedule of whole backwards")
            setattr(weight, _MARK, self)

    def end(self) -> None:
        """After a batch, or what there was of it."""
        for weight in self._weights:
            vars(weight).pop(_MARK, None)
        self._left.clear()
        self._queued.clear()

    def leave(self, unit: Unit, backward: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return what `backward`, the first half of `unit`, returns; what it leaves is kept for `compute`."""
        self._uses, before = [], self._queues()
        try:
            found = backward()
        finally:
            uses, self._uses = self._uses, None
        self._queued[unit] = [after - length for length, after in zip(before, self._queues(), strict=True)]
        of_weight: dict[int, list[_Use]] = {}
        for use in uses:  # a weight comes where it is used last, as its gradient is then complete
            of_weight[id(use.weight)] = [*of_weight.pop(id(use.weight), []), use]
        with self._recording(unit), torch.enable_grad():
            self._left[unit] = [_product_of(uses) for uses in of_weight.values()]
        return found

    def compute(self, unit: Unit) -> None:
        """Accumulate the gradients that the first half of `unit` has left, in the order of a whole backward."""
        left = self._left.pop(unit)[::-1]
        while left:
            node = left.pop()
            torch.autograd.backward(node, node.detach())
        for layer, count in zip(self._layers, self._queued.pop(unit), strict=True):
            for _ in range(count):
                layer.backward_dw()

    def add(self, use: _Use) -> None:
        """Leave a product for the second half. Raises RuntimeError outside of a first half."""
        if self._uses is None:
            raise RuntimeError("a backward outside of the schedule reaches layers whose backwards are in halves")
        self._uses.append(use)

    def _queues(self) -> list[int]:
        return [layer.wgrad_store.context.qsize() for layer in self._layers]


def whole_layers(chunks: Iterable[torch.nn.Module]) -> int:
    """Return how many layers could leave gradients for a second half, and were not made to."""
    return sum(hasattr(one, "wgrad_store") and not _delays(one) for chunk in chunks for one in chunk.modules())


def delaying_layers(chunks: Iterable[torch.nn.Module]) -> int:
    """Return how many layers have queues of their own, whose memory nobody counts."""
    return sum(_delays(one) for chunk in chunks for one in chunk.modules())


def _delays(layer: Any) -> bool:
    """Return whether `layer` is one of Transformer Engine's whose backward queues the gradients of its weights."""
    store = getattr(layer, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def linear_layers() -> PatchSet:
    """The patch under which layers of chunks with `WeightGradients` under way leave their products to them."""
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
            use = _Use(weight, taken.detach(), gradient.detach(), _Linear.of(ctx), streams.current(gradient.device))
            getattr(weight, _MARK).add(use)
            of_bias = _flat(gradient, gradient)[0].sum(dim=0) if ctx.use_bias else None
            return _of_input(ctx, taken, weight, gradient), of_bias, None, *[None] * ctx.rest

    class Linear(whole):  # type: ignore[misc]
        @classmethod
        def apply(cls, taken: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
            buffer, shards = rest[3], rest[6:]  # of gathered weights, from 0.19 on
            left = torch.is_grad_enabled() and taken.requires_grad and hasattr(weight, _MARK)
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


def _product_of(uses: list[_Use]) -> Tensor:
    """The node whose backward accumulates the gradient of the weight of `uses`; on the stream of the last."""
    tensors = [tensor for use in uses for tensor in (use.taken, use.gradient)]
    with streams.on(uses[-1].stream):
        return cast(Tensor, _Products.apply(uses[-1].weight, [use.linear for use in uses], *tensors))  # type: ignore[no-untyped-call]


class _Products(torch.autograd.Function):
    """Its backward gives the gradient of a weight: the sum of the products of its uses, in their order.

    Where Megatron's kernel has added them to `main_grad`, it gives what Megatron gives in place of a gradient.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, linear: list[_Linear], *tensors: Tensor) -> Tensor:
        ctx.weight, ctx.linear = weight, linear
        ctx.save_for_backward(*tensors)
        return weight.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        saved, total = ctx.saved_tensors, None
        for linear, taken, gradient in zip(ctx.linear, saved[::2], saved[1::2], strict=True):
            enabled, dtype = linear.autocast
            with torch.autocast("cuda", dtype, enabled):
                product = _product(ctx.weight, linear, taken, gradient)
            if product is not None:
                product = product.to(ctx.weight.dtype)
                total = product if total is None else total + product
        if total is None:
            total = _placeholder(ctx.weight, saved[0].dtype)
        return total, None, *[None] * len(saved)


def _product(weight: Any, linear: _Linear, taken: Tensor, gradient: Tensor) -> Tensor | None:
    """The gradient of `weight` by one use; None where Megatron's kernel has added it to `main_grad`."""
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
    return None


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
