"""Linear layers with the interface of Transformer Engine's (2.8), whose weight gradients can be delayed; on the CPU.

As in transformer_engine/pytorch/module: a backward puts what a product needs into the module's own queue, first in,
first out; `backward_dw()` takes the oldest, sets the gradient and calls what data parallelism has registered in place
of its hooks on the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

__all__ = ["replace_linear_layers"]


def replace_linear_layers(module: torch.nn.Module, delay: bool) -> None:
    """Give every linear layer inside the layers of `module` its stand-in, with the same parameters."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ColumnParallelLinear | RowParallelLinear) and name.startswith("linear_"):
                setattr(parent, name, _Linear(child, delay))


class _Store:
    def __init__(self, delay: bool) -> None:
        self.context: Queue[tuple[Tensor, Tensor]] = Queue()
        self._delay = delay

    def delay_wgrad_compute(self) -> bool:
        return self._delay


class _Linear(torch.nn.Module):
    def __init__(self, like: Any, delay: bool) -> None:
        super().__init__()
        self.weight, self.bias, self._skip_bias = like.weight, like.bias, like.skip_bias_add
        self.wgrad_store = _Store(delay)
        self._hooks: list[Callable[[], object]] = []
        if delay:
            self.weight.skip_backward_post_hook = True

    def forward(self, value: Tensor, *_: Any) -> tuple[Tensor, Tensor | None]:
        bias = None if self._skip_bias else self.bias
        return _Function.apply(value, self.weight, bias, self.wgrad_store), self.bias if self._skip_bias else None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        self._hooks.append(hook)

    def backward_dw(self) -> None:
        if self.wgrad_store.context.empty():
            raise RuntimeError("Pop empty queue")
        self.weight.grad = _product(*self.wgrad_store.context.get_nowait())
        for hook in self._hooks:
            hook()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, store: _Store) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.store, ctx.has_bias = store, bias is not None
        product = value.matmul(weight.t())
        return product if bias is None else product + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        value, weight = ctx.saved_tensors
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(dim=0) if ctx.has_bias else None
        of_weight = None
        if ctx.store.delay_wgrad_compute():
            ctx.store.context.put((value, gradient))
        else:
            of_weight = _product(value, gradient)
        return gradient.matmul(weight), of_weight, of_bias, None


def _product(value: Tensor, gradient: Tensor) -> Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).t().matmul(value.reshape(-1, value.shape[-1]))
