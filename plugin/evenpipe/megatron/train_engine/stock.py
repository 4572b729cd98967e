"""Megatron's own schedules, observed through the actions that they are expected to carry out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from evenpipe.megatron.supported import SCHEDULES, core_patch
from evenpipe.megatron.train_engine.symbols import TRAINED
from evenpipe.schedule import BACKWARD, FORWARD, Kind
from evenpipe.train.expected import ExpectedActions
from evenpipe.upstream import PatchSet

__all__ = ["StockSchedule", "reporting_to"]


class StockSchedule(ExpectedActions):
    """One stage's side of a Megatron schedule, which leaves nothing under way, and chooses nothing."""

    extra: None = None
    adaptive: None = None


def reporting_to(schedule: StockSchedule) -> PatchSet:
    """The patches under which Megatron's forward and backward steps report to `schedule`."""
    reason = "Megatron's schedules do not tell which micro-batch they are at, when, and what it saved"
    steps: dict[str, Kind] = {"forward_step": FORWARD, "backward_step": BACKWARD}
    return PatchSet(
        "follow",
        [
            core_patch(step, f"{SCHEDULES}:{step}", functools.partial(_report, schedule, kind), reason)
            for step, kind in steps.items()
        ],
        TRAINED,
    )


def _report(schedule: StockSchedule, kind: Kind, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with schedule.action(kind):
        return original(*args, **kwargs)
