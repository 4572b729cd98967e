"""Linear layers in what `torch.compile` compiles: the compiled backward leaves the gradients of their weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from evenpipe.runtime import streams

__all__ = ["SPLITS", "anchor_of", "linear_in_graph", "whole_in_graph"]

#: On a weight: whether graphs that are compiled under `LinearGradients.calls` leave its gradient.
SPLITS: Final = "evenpipe_splits"
#: On the memory of an anchor: what takes that which compiled backwards leave.
_TAKE: Final = "evenpipe_take"


def anchor_of(like: Tensor, take: Callable[[Tensor, list[Tensor]], None]) -> Tensor:
    """Return an input of graphs whose backwards call `take(weight, tensors)`: the weight by its memory.

    Inductor drops an operator whose result nobody needs, or has no elements. So what leaves a product returns a number,
    the gradient of the anchor.
    """
    anchor = torch.zeros((), device=like.device, requires_grad=True)
    setattr(anchor.untyped_storage(), _TAKE, take)  # which every tensor that stands for the anchor has
    return anchor


def linear_in_graph(func: Any, anchor: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a linear layer whose compiled backward leaves the gradient of its weight.

    Dynamo traces it. All but that gradient is traced as without, so that the backend compiles the same operations.
    """
    stand_in = weight.detach()
    if torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
        input, stand_in = input.to(dtype), stand_in.to(dtype)
    output: Tensor = _Leave.apply(  # type: ignore[no-untyped-call]
        func(input, stand_in, bias), input.detach(), weight.detach(), anchor, _number()
    )
    return output


def whole_in_graph(anchor: Tensor, weight: Tensor) -> Tensor:
    """Return the weight as an input of what is computed with it, whose compiled backward leaves its gradient."""
    stand_in: Tensor = _LeaveWhole.apply(weight.detach(), anchor, _number())  # type: ignore[no-untyped-call]
    return stand_in


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number(numbers: count[int] = count()) -> int:  # noqa: B008 (numbers go on from call to call)
    """Return another number for each linear layer that is traced: of equal operators, a compiler keeps one."""
    return next(numbers)


class _Leave(torch.autograd.Function):
    """The output of a linear layer that has been computed without a gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, kept: Tensor, weight: Tensor, anchor: Tensor, number: int) -> Tensor:
        ctx.number = number
        ctx.save_for_backward(kept, weight, anchor)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        kept, weight, anchor = ctx.saved_tensors
        return gradient, None, None, _leave([kept, gradient], weight, anchor, ctx.number), None


class _LeaveWhole(torch.autograd.Function):
    """A weight whose gradient is computed in the first half, and left for the second."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, anchor: Tensor, number: int) -> Tensor:
        ctx.number = number
        ctx.save_for_backward(weight, anchor)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, anchor = ctx.saved_tensors
        return None, _leave([gradient], weight, anchor, ctx.number), None


@torch.library.custom_op("evenpipe::leave", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _leave(tensors: list[Tensor], weight: Tensor, anchor: Tensor, number: int) -> Tensor:
    """Leave copies: Inductor writes other values over its operators' arguments once no operator needs them."""
    take = getattr(anchor.untyped_storage(), _TAKE, None)
    if take is None or streams.is_capturing(anchor.device):
        raise RuntimeError(
            "a compiled part of a backward in halves is captured in a CUDA graph, or runs on copies of its inputs: "
            "compile it without CUDA graphs, or take a schedule of whole backwards, such as 1f1b"
        )
    take(weight, [one.clone() for one in tensors])
    return torch.zeros_like(anchor)


@_leave.register_fake
def _leave_nothing(tensors: list[Tensor], weight: Tensor, anchor: Tensor, number: int) -> Tensor:
    return torch.empty_like(anchor)
