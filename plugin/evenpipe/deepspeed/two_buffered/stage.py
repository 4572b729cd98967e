"""A stage of DeepSpeed's in a stream of batches: each micro-batch on its batch's weight version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from evenpipe.deepspeed.boundary import Boundary
from evenpipe.deepspeed.stage import EngineStage
from evenpipe.deepspeed.two_buffered.steps import DeferredSteps
from evenpipe.schedule import Stream, Unit, required_version

__all__ = ["StreamStage"]


class StreamStage(EngineStage):
    """Micro-batches are numbered along `stream`, which begins with the batch that `steps` expects next."""

    def __init__(
        self, engine: Any, boundary: Boundary, stream: Stream, buffer_of: Callable[[Unit], int], steps: DeferredSteps
    ) -> None:
        evicts = stream.program.schedule.evictions[engine.stage_id] > 0
        super().__init__(engine, boundary, buffer_of, evicts)
        self._micro_batches = stream.micro_batches
        self._steps = steps
        self._first = steps.batch

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """On the version that the micro-batch's batch needs."""
        self._steps.versions.use(self._version(unit))
        return super().forward(unit, inputs)

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """On the same."""
        self._steps.versions.use(self._version(unit))
        if unit in self._losses:
            self._losses[unit] = self._steps.scaled(self._losses[unit])
        return super().backward(unit, gradients)

    def update(self, batch: int) -> None:
        """Finish the step of the batch before, the only one that can be submitted."""
        self._steps.finish()

    def _version(self, unit: Unit) -> int:
        return required_version(self._first + unit.micro_batch // self._micro_batches)
