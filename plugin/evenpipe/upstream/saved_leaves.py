"""The patch under which leaves keep their identity on the way through torch's saved-tensor hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from evenpipe.upstream.expectation import ANY, Distribution
from evenpipe.upstream.patches import Patch
from evenpipe.upstream.symbols import BUILTIN, MARK

__all__ = ["keeping_identity", "keeps_identity"]


def keeping_identity() -> Patch:
    """Autograd makes a new tensor of whatever a hook returns, which goes wrong in two ways.

    A function that adds its weight's gradient to `main_grad` itself (Megatron's linear layers, Transformer Engine's
    modules) returns a placeholder if the weight has an attribute `grad_added_to_main_grad`, else None. For the
    placeholder, autograd makes the stream of the parameter's hooks, where the reduction starts, wait for the kernel.

    `CheckpointWithoutOutput` of megatron-core 0.14 and 0.15 recomputes from `ctx.saved_tensors` and later looks there
    for the gradients: in the same tensors, as it thinks.

    Needed from the first recorded backward on: models and their wrappers may be older.
    """
    return Patch(
        name="saved tensors",
        targets=("torch.autograd.function:BackwardCFunction.saved_tensors",),
        distribution=Distribution("torch"),
        versions={ANY: BUILTIN},
        replacement=_SavedTensors,
        reason="recorded tensors come back as other objects, without their attributes (`grad_added_to_main_grad`)",
    )


def keeps_identity() -> bool:
    """Return whether the patch is applied in this process."""
    return hasattr(torch.autograd.function.BackwardCFunction.saved_tensors, MARK)


class _SavedTensors:
    """The attribute of every autograd function's context."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, context: Any, owner: type | None = None) -> Any:
        if context is None:
            return self
        saved = self._original.__get__(context, owner)
        return tuple(map(_itself, saved)) if any(map(_is_of_a_leaf, saved)) else saved


def _is_of_a_leaf(tensor: Tensor | None) -> bool:
    """Return whether `tensor` was made from a leaf on its way through hooks."""
    return tensor is not None and tensor.requires_grad and tensor.is_leaf and type(tensor) is not Parameter


def _itself(tensor: Tensor | None) -> Tensor | None:
    """Return the leaf that was saved, if `tensor` was made from one. It lives as long as its gradient is expected."""
    if tensor is None or not _is_of_a_leaf(tensor):
        return tensor
    with torch.enable_grad():
        view = tensor.expand_as(tensor)  # as Megatron does, and Transformer Engine expects
    assert view.grad_fn is not None
    leaf: Tensor = view.grad_fn.next_functions[0][0].variable  # type: ignore[union-attr]
    return leaf
