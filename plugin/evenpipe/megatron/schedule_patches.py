"""The patches under which Megatron's training loop is given EvenPipe's schedule, and saved leaves stay themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from evenpipe.megatron.supported import MEGATRON_CORE, SCHEDULES, of_schedules, recorded
from evenpipe.megatron.weight_gradients import linear_layers
from evenpipe.upstream import Patch, PatchSet, around
from evenpipe.upstream.saved_leaves import keeping_identity

__all__ = ["in_place_of_megatron"]

_CHOICE = f"{SCHEDULES}:get_forward_backward_func"


def in_place_of_megatron(schedule: Callable[..., Any], called: Callable[..., Any] | None = None) -> PatchSet:
    """The patches under which `get_forward_backward_func` returns `schedule` where it would return a pipelined one.

    It returns `called` instead, where that calls `schedule`.
    Where `schedule.needs` backwards in two halves, layers can do them too.
    """
    choice = Patch(
        name="schedule",
        targets=(_CHOICE, "megatron.core.pipeline_parallel:get_forward_backward_func"),
        distribution=MEGATRON_CORE,
        versions=recorded(_CHOICE),
        replacement=around(functools.partial(_choose, called or schedule)),
        reason="Megatron takes groups and a communicator from outside (pg_collection=, p2p_communicator=), but in no "
        "release an order of micro-batches",
        rebinds=True,
    )
    patches, calls = [choice, keeping_identity()], [each for each in of_schedules() if each.symbol != _CHOICE]
    if "split" in getattr(schedule, "needs", ()):
        layers = linear_layers()
        patches, calls = [*patches, *layers.list()], [*calls, *layers.expectations]
    return PatchSet("schedule", patches, calls)


def _choose(schedule: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    chosen = original(*args, **kwargs)
    return chosen if chosen is forward_backward_no_pipelining else schedule
