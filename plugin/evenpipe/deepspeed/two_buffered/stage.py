"""A stage of DeepSpeed's in a stream of batches: each micro-batch on its batch's weight version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from evenpipe.deepspeed.boundary import Boundary
from evenpipe.deepspeed.stage import EngineStage
from evenpipe.deepspeed.two_buffered.steps import EngineSteps
from evenpipe.delayed import DelayedStream
from evenpipe.schedule import Stream, Unit

__all__ = ["StreamStage"]


class StreamStage(EngineStage):
    """Micro-batches are numbered along `stream`; `settle` waits until other stages have what they were sent."""

    def __init__(
        self,
        engine: Any,
        boundary: Boundary,
        stream: Stream,
        steps: EngineSteps,
        delayed: DelayedStream,
        settle: Callable[[], None],
    ) -> None:
        evicts = stream.program.schedule.evictions[engine.stage_id] > 0
        buffers = stream.stages - engine.stage_id
        super().__init__(engine, boundary, lambda unit: unit.micro_batch % buffers, evicts)
        self._steps = steps
        self._delayed = delayed
        self._settle = settle

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """On the version that the micro-batch's batch needs."""
        self._delayed.use_version_of(unit)
        return super().forward(unit, inputs)

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """On the same."""
        self._delayed.use_version_of(unit)
        if unit in self._losses:
            self._losses[unit] = self._steps.scaled(self._losses[unit])
        return super().backward(unit, gradients)

    def update(self, batch: int) -> None:
        """Finish the step of the batch before, the only one that can be submitted."""
        self._steps.finish()

    def forget(self) -> None:
        """Let go of what has been forwarded and not backwarded."""
        self._settle()
        for of_kind in self._engine.pipe_buffers.values():
            of_kind[:] = [None] * len(of_kind)
