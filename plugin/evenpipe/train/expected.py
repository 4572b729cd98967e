"""Follows a schedule that an engine's framework carries out by itself, through the actions that are expected of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import FORWARD, Action, Kind
from evenpipe.train.recorder import Recorder

__all__ = ["ExpectedActions"]


class ExpectedActions:
    """One stage's side of a schedule: tells a recorder of each compute action, and counts what it saves.

    `expected` are the compute actions of one batch, in order; `parameters` are not counted as saved.
    """

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
