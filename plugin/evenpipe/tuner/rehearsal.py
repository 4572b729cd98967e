"""What one stage computes and saves for micro-batches of a size, found by doing it (Ada-Grouper §5.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from evenpipe.planner.grouped import average_ms
from evenpipe.planner.memory import Measured
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.stage import Stage
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import BACKWARD, FORWARD, Schedule, Size, Unit, build

__all__ = ["Rehearsal"]

#: Micro-batches that are timed, after those that load kernels and fill caches, which are weighed.
_WEIGHED: Final = 2
_TIMED: Final = 4
#: More of them are weighed where they differ.
_WEIGHED_OF_DIFFERENT: Final = 6


class Rehearsal:
    """One stage forwards and backwards micro-batches alone: no neighbour is waited for or sent to.

    What it computes with is made up where a neighbour would give it, so all it leaves behind is of no use.
    `parameters` are not counted as saved. `fits` says whether so many bytes of activations may be held; all ranks ask
    it alike.
    """

    def __init__(
        self, executor: Executor, stages: int, parameters: Sequence[Tensor], fits: Callable[[int], bool]
    ) -> None:
        self._clock = executor.clock
        self._device = executor.device
        self._stage = executor.stage_index
        self._stages = stages
        self._parameters = parameters
        self._fits = fits
        self._shared_bytes: int | None = None

    def measured(
        self, make: Callable[[Schedule], Stage], message_bytes: int, workspace: Callable[[], int], differ: bool
    ) -> Measured:
        """What micro-batches take and hold here, but for what stays from batch to batch, which is 0.

        `make` gives the stage that trains on micro-batches of a schedule; `workspace` what it keeps of memory beside
        what autograd saves, when some have been weighed.

        Of the first size, two are held at a time, if they fit, which shows what micro-batches share (such as a causal
        mask); else they are taken to share nothing. Of others one is. Where micro-batches `differ`, as with experts,
        several are, one by one, and the largest counts: what two of them save says nothing of what they share.
        """
        weighed = _WEIGHED_OF_DIFFERENT if differ else _WEIGHED
        # One micro-batch more than are used: with the last one, replicas would begin to reduce gradients.
        stage = make(build("gpipe", Size(self._stages, weighed + _TIMED + 1)).schedule)
        alone = _Alone(stage, self._stage == 0, self._stage == self._stages - 1)
        if differ:
            each, shared = max(self._weighed(alone, [Unit(number)])[0] for number in range(weighed)), 0
        else:
            each, shared = self._shared(alone)
        workspace_bytes = workspace()
        marks = [self._timed(alone, Unit(weighed + number)) for number in range(_TIMED)]
        forward_ms = average_ms(self._clock.elapsed_ms(start, between) for start, between, _ in marks)
        backward_ms = average_ms(self._clock.elapsed_ms(between, end) for _, between, end in marks)
        return Measured(forward_ms, backward_ms, each, shared, message_bytes, workspace_bytes, 0)

    def _shared(self, alone: _Alone) -> tuple[int, int]:
        """Bytes that a micro-batch saves, and that are shared."""
        if self._shared_bytes is None:
            saved = self._weighed(alone, [Unit(0), Unit(1)])
            self._shared_bytes = saved[0] - saved[-1]
            return saved[-1], self._shared_bytes
        [first] = self._weighed(alone, [Unit(0)])
        return first - self._shared_bytes, self._shared_bytes

    def _weighed(self, alone: _Alone, units: Sequence[Unit]) -> list[int]:
        """Bytes that each of the units saves while those before are held, as far as they fit; the first always does."""
        store = ActivationStore(self._parameters, device=self._device)
        saved: list[int] = []
        for unit in units:
            if saved and not self._fits(2 * saved[0]):
                break
            inputs = alone.inputs(unit)
            with store.recording(unit):
                alone.stage.forward(unit, inputs)
            saved.append(store.nbytes(unit))
        for unit in units[: len(saved)]:
            alone.stage.backward(unit, alone.gradients(unit))
        return saved

    def _timed(self, alone: _Alone, unit: Unit) -> tuple[Any, Any, Any]:
        """Marks of the clock before, between and after the two passes."""
        inputs, gradients = alone.inputs(unit), alone.gradients(unit)
        start = self._clock.mark()
        alone.stage.forward(unit, inputs)
        between = self._clock.mark()
        alone.stage.backward(unit, gradients)
        return start, between, self._clock.mark()


class _Alone(NamedTuple):
    """A stage, and what its neighbours would give it: numbers of a usual size, as others may be slow."""

    stage: Stage
    is_first: bool
    is_last: bool

    def inputs(self, unit: Unit) -> list[Tensor] | None:
        return None if self.is_first else _made_up(self.stage.receive_buffers(FORWARD, unit))

    def gradients(self, unit: Unit) -> list[Tensor] | None:
        return None if self.is_last else _made_up(self.stage.receive_buffers(BACKWARD, unit))


@torch.no_grad()
def _made_up(buffers: list[Tensor]) -> list[Tensor]:
    return [buffer.normal_() for buffer in buffers]
