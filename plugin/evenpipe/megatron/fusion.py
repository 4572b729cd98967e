"""Gradient accumulation fusion with recorded activations: autograd functions get their parameters back, not copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from evenpipe.upstream import ANY, BUILTIN, Distribution, Patch
from evenpipe.upstream.symbols import MARK

__all__ = ["knows_parameters", "parameters_themselves"]


def parameters_themselves() -> Patch:
    """The patch under which `ctx.saved_tensors` has the parameters that were saved, whether through hooks or not.

    Needed from the first recorded backward on; models and their data-parallel wrappers may be older.
    """
    return Patch(
        name="parameters in backward",
        targets=("torch.autograd.function:BackwardCFunction.saved_tensors",),
        distribution=Distribution("torch"),
        versions={ANY: BUILTIN},
        replacement=_SavedTensors,
        reason="fused weight gradients are told by attributes of the parameter, which recorded ones come back without",
    )


def knows_parameters() -> bool:
    """Whether the patch is applied in this process."""
    return hasattr(torch.autograd.function.BackwardCFunction.saved_tensors, MARK)


class _SavedTensors:
    """The attribute of every autograd function's context, read in its backward.

    A function that adds its weight's gradient to `main_grad` itself (Megatron's linear layers, Transformer Engine's
    modules) returns a placeholder if the weight has `grad_added_to_main_grad`, else None. The placeholder is needed:
    for it, autograd makes the stream of the parameter's hooks, where the reduction starts, wait for the kernel.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, context: Any, owner: type | None = None) -> Any:
        if context is None:
            return self
        return tuple(_itself(tensor) for tensor in self._original.__get__(context, owner))


def _itself(tensor: Tensor | None) -> Tensor | None:
    """The parameter that `tensor` was made from when it was unpacked; else `tensor`."""
    if tensor is None or not tensor.requires_grad or not tensor.is_leaf or isinstance(tensor, Parameter):
        return tensor
    with torch.enable_grad():
        view = tensor.expand_as(tensor)  # as Megatron does, and Transformer Engine expects
    assert view.grad_fn is not None
    original = view.grad_fn.next_functions[0][0].variable  # type: ignore[union-attr]
    return original if isinstance(original, Parameter) else tensor
