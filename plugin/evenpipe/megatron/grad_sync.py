"""When data-parallel gradients and parameters are synchronised during a batch, as Megatron's own schedules do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from evenpipe.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Schedule

__all__ = ["GradSync", "Sync", "without_sync"]


class Sync:
    """When gradients (and parameters) are synchronised between replicas; here nothing is."""

    def start(self) -> None:
        """Before the batch."""

    def before_forward(self) -> None:
        """Before each forward."""

    def before_backward(self) -> None:
        """Before each backward."""

    def after_backward(self) -> None:
        """After each backward."""

    def finish(self) -> None:
        """After the batch."""


class GradSync(Sync):
    """One batch on one stage.

    The reduction of a chunk is enabled for its last backward only; of backwards in two halves for the last of either
    half, as each has the gradients of its own parameters. With `config.grad_sync_func` all stages start a chunk's
    reduction at the same time instead: stage s, which runs s actions ahead, waits for s more backwards.
    """

    def __init__(self, config: Any, model: Sequence[Any], schedule: Schedule, stage: int) -> None:
        interleaved = schedule.chunks > 1
        self._model = model
        self._config = config
        self._grad_sync = _per_chunk(config.grad_sync_func, model)
        self._param_sync = _per_chunk(config.param_sync_func, model) if interleaved else None
        self._lag = stage if interleaved else 0
        row = schedule.actions[stage]
        self._forwards = [action.unit for action in row if action.kind == FORWARD]
        self._backwards = [*_halves(row)]
        last = {(action.chunk, action.kind): action for action in self._backwards}
        self._last = {*last.values()}
        #: Those after which a unit has all its gradients.
        self._completing = [action for action in self._backwards if action.kind != INPUT_GRADIENT]
        self._forward = self._backward = self._completed = 0
        self._synchronised: set[int] = set()
        self._disabled: ExitStack | None = None
        # Without interleaving only the first stage, which ends last, reduces during its last backward; the others
        # call grad_sync_func in the bubble that follows.
        self._during_backward = self._grad_sync is None or (not interleaved and stage == 0)

    def start(self) -> None:
        self._disable()
        for chunk in range(min(2, len(self._model)) if self._param_sync is not None else 0):
            self._synchronise_parameters(chunk)

    def before_forward(self) -> None:
        """Before each forward: gather the parameters of the chunk after the one that starts `stage` forwards on."""
        ahead = self._forward + self._lag
        self._forward += 1
        if self._param_sync is None or ahead >= len(self._forwards) or self._forwards[ahead].micro_batch != 0:
            return
        chunk = self._forwards[ahead].chunk + 1
        if 1 < chunk < len(self._model):
            self._synchronise_parameters(chunk)

    def before_backward(self) -> None:
        action = self._backwards[self._backward]
        if self._during_backward and action in self._last:
            self._enable()
            self._synchronised.add(action.chunk)

    def after_backward(self) -> None:
        action, behind = self._backwards[self._backward], self._completed - self._lag
        self._backward += 1
        if action.kind != INPUT_GRADIENT:
            self._completed += 1
            if len(self._model) == 1:
                return
            if self._grad_sync is not None and behind >= 0 and (late := self._completing[behind]) in self._last:
                self._enable()
                self._synchronise_gradients(late.chunk)
        self._disable()

    def finish(self) -> None:
        """After the batch: whatever has not been reduced yet."""
        self._enable()
        for chunk in range(len(self._model) if self._grad_sync is not None else 0):
            if chunk not in self._synchronised:
                self._synchronise_gradients(chunk)

    def _synchronise_parameters(self, chunk: int) -> None:
        assert self._param_sync is not None
        self._param_sync[chunk](self._model[chunk].parameters())

    def _synchronise_gradients(self, chunk: int) -> None:
        assert self._grad_sync is not None
        self._grad_sync[chunk](self._model[chunk].parameters())
        self._synchronised.add(chunk)

    def _disable(self) -> None:
        if self._disabled is None:
            self._disabled = without_sync(self._config)

    def _enable(self) -> None:
        if self._disabled is not None:
            self._disabled.close()
            self._disabled = None


def _halves(row: Sequence[Action]) -> Iterator[Action]:
    """The backwards of a stage; each as two halves, where it has any that are."""
    split = any(action.kind == WEIGHT_GRADIENT for action in row)
    for action in row:
        if action.kind == BACKWARD and split:
            yield from (action._replace(kind=INPUT_GRADIENT), action._replace(kind=WEIGHT_GRADIENT))
        elif action.kind in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
            yield action


def without_sync(config: Any) -> ExitStack:
    """Entered, the contexts of `config.no_sync_func`, in which backwards start no reduction; `close()` leaves them."""
    functions, stack = config.no_sync_func, ExitStack()
    for context in functions if isinstance(functions, list) else [functions] if functions is not None else []:
        stack.enter_context(context())
    return stack


def _per_chunk(function: Any, model: Sequence[Any]) -> list[Callable[[Any], Any]] | None:
    if function is None or isinstance(function, list):
        return function
    return [function] * len(model)
