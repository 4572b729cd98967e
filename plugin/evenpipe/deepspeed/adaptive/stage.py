"""A stage that measures what its micro-batches take and hold while they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from evenpipe.deepspeed.boundary import Boundary, tensors_of
from evenpipe.deepspeed.stage import EngineStage
from evenpipe.planner.memory import Measured
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import Unit
from evenpipe.tuner.process_memory import storage_bytes

__all__ = ["MeasuredStage", "Measurements"]

#: Micro-batches that are timed, after one that loads kernels and fills caches.
_TIMED: Final = 3


class Measurements:
    """What one stage takes and holds for micro-batches of one size while they train, and the executor measures."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.forwards: list[tuple[Any, Any]] = []
        self.backwards: list[tuple[Any, Any]] = []
        self.held: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether no more batches have to be measured."""
        return len(self.backwards) > _TIMED

    def summary(self, message_bytes: int, static_bytes: int) -> Measured:
        """Of times the shortest: nobody else uses the device (Ada-Grouper §4.3), so others were held up by the host."""
        forward_ms, backward_ms = (
            min(self.executor.clock.elapsed_ms(start, end) for start, end in spans[1:])
            for spans in (self.forwards, self.backwards)
        )
        # The first to save what others save too counts as holding it.
        each, most = min(self.held), max(self.held)
        return Measured(forward_ms, backward_ms, each, most - each, message_bytes, 0, static_bytes)


class MeasuredStage(EngineStage):
    """Trains as ever, and has its micro-batches measured."""

    def __init__(
        self, found: Measurements, engine: Any, boundary: Boundary, buffer_of: Callable[[Unit], int], evicts: bool
    ) -> None:
        super().__init__(engine, boundary, buffer_of, evicts)
        self._measurements = found

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Timed; then weighed."""
        clock = self._measurements.executor.clock
        start = clock.mark()
        results = super().forward(unit, inputs)
        self._measurements.forwards.append((start, clock.mark()))
        self._measurements.held.append(self._measurements.executor.store.nbytes(unit) + self._beside(unit))
        return results

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Timed."""
        clock = self._measurements.executor.clock
        start = clock.mark()
        results = super().backward(unit, gradients)
        self._measurements.backwards.append((start, clock.mark()))
        return results

    def _beside(self, unit: Unit) -> int:
        """Bytes that the engine keeps of a micro-batch until its backward, beside what autograd saves."""
        buffer = self._buffer_of(unit)
        kept = [tensor for of_kind in self._engine.pipe_buffers.values() for tensor in tensors_of(of_kind[buffer])]
        return storage_bytes(tensor for tensor in kept if isinstance(tensor, Tensor))
