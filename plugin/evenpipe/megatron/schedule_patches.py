"""The patches under which Megatron's training loop is given EvenPipe's schedule, and saved leaves stay themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from evenpipe.megatron.supported import MEGATRON_CORE, SCHEDULES, installed_release, recorded
from evenpipe.upstream import ANY, BUILTIN, Distribution, Expectation, Patch, PatchSet, around
from evenpipe.upstream.symbols import MARK

__all__ = ["in_place_of_megatron", "keeping_identity", "keeps_identity", "schedule_patches"]

_CHOICE = f"{SCHEDULES}:get_forward_backward_func"


def in_place_of_megatron(schedule: Callable[..., Any]) -> PatchSet:
    """The patches under which `get_forward_backward_func` returns `schedule` where it would return a pipelined one."""
    called = [symbol for symbol in installed_release().signatures if symbol != _CHOICE]
    expectations = [Expectation(symbol, MEGATRON_CORE, recorded(symbol)) for symbol in called]
    return PatchSet("schedule", schedule_patches(schedule), expectations)


def schedule_patches(schedule: Callable[..., Any]) -> list[Patch]:
    """What `in_place_of_megatron` applies; made without looking at what is installed."""
    choice = Patch(
        name="schedule",
        targets=(_CHOICE, "megatron.core.pipeline_parallel:get_forward_backward_func"),
        distribution=MEGATRON_CORE,
        versions=recorded(_CHOICE),
        replacement=around(functools.partial(_choose, schedule)),
        reason="Megatron has no other way to plug in a pipeline schedule",
        rebinds=True,
    )
    return [choice, keeping_identity()]


def _choose(schedule: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    chosen = original(*args, **kwargs)
    return chosen if chosen is forward_backward_no_pipelining else schedule


def keeping_identity() -> Patch:
    """The patch under which leaves keep their identity on the way through saved-tensor hooks.

    Autograd makes a new tensor of whatever a hook returns. Two things in Megatron go wrong with that:

    A function that adds its weight's gradient to `main_grad` itself (Megatron's linear layers, Transformer Engine's
    modules) returns a placeholder if the weight has an attribute `grad_added_to_main_grad`, else None. For the
    placeholder, autograd makes the stream of the parameter's hooks, where the reduction starts, wait for the kernel.

    `CheckpointWithoutOutput` of 0.14 and 0.15 recomputes from `ctx.saved_tensors` and later looks there for the
    gradients: in the same tensors, as it thinks.

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
    """Whether the patch is applied in this process."""
    return hasattr(torch.autograd.function.BackwardCFunction.saved_tensors, MARK)


class _SavedTensors:
    """The attribute of every autograd function's context."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, context: Any, owner: type | None = None) -> Any:
        if context is None:
            return self
        return tuple(_itself(tensor) for tensor in self._original.__get__(context, owner))


def _itself(tensor: Tensor | None) -> Tensor | None:
    """The leaf that was saved, if `tensor` was made from one. It lives as long as its gradient is expected."""
    if tensor is None or not tensor.requires_grad or not tensor.is_leaf or type(tensor) is Parameter:
        return tensor
    with torch.enable_grad():
        view = tensor.expand_as(tensor)  # as Megatron does, and Transformer Engine expects
    assert view.grad_fn is not None
    leaf: Tensor = view.grad_fn.next_functions[0][0].variable  # type: ignore[union-attr]
    return leaf
