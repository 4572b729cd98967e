"""Megatron's own schedules, observed through the actions that they are expected to carry out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from evenpipe.megatron.supported import SCHEDULES, core_patch
from evenpipe.megatron.symbols import TRAINED
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import BACKWARD, FORWARD, Action, Kind
from evenpipe.train.engine import Recorder
from evenpipe.upstream import PatchSet

__all__ = ["StockSchedule", "reporting_to"]


class StockSchedule:
    """One stage's side of a Megatron schedule: tells a recorder of each compute action, and counts what it saves.

    `expected` are the compute actions of one batch, in order; `parameters` are not counted as saved. Megatron leaves
    nothing under way, and chooses nothing.
    """

    extra: None = None
    adaptive: None = None

    def __init__(self, expected: Sequence[Action], parameters: Iterable[torch.Tensor], recorder: Recorder) -> None:
        self.counter = MemoryCounter()
        self._store = ActivationStore(parameters, self.counter)
        self._recorder = recorder
        self._expected = tuple(expected)
        self._next = 0

    def start_batch(self) -> None:
        """A batch begins."""
        self._next = 0

    @contextmanager
    def action(self, kind: Kind) -> Iterator[None]:
        """Around the next action. Raises RuntimeError when another kind of action was expected."""
        action = self._expected[self._next] if self._next < len(self._expected) else None
        if action is None or action.kind != kind:
            raise RuntimeError(f"the framework's schedule goes on with {kind}, not with {action or 'its end'}")
        self._next += 1
        self._recorder.started(action)
        with self._store.recording(action.unit) if kind == FORWARD else nullcontext():
            yield
        self._recorder.ended(action)
        if kind == FORWARD:
            self._recorder.saved(action, self._store.nbytes(action.unit))


def reporting_to(schedule: StockSchedule) -> PatchSet:
    """Return the patches under which Megatron's forward and backward steps report to `schedule`."""
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
