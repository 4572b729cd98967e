"""What micro-batches of one size take and save, found while batches of them train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from evenpipe.deepspeed.boundary import Boundary, tensors_of
from evenpipe.deepspeed.stage import EngineStage
from evenpipe.planner import StageTimes
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import Unit
from evenpipe.tuner.collective import highest_of_all

__all__ = ["Measured", "MeasuredStage", "Notes"]

#: Micro-batches that are timed, after one that loads kernels and fills caches.
_TIMED: Final = 3


class Measured(NamedTuple):
    """By stage, and of its replicas the most: milliseconds and bytes of a micro-batch; what stays between batches.

    Every micro-batch holds `each_bytes` until its backward, and all of them together `shared_bytes` (such as a mask);
    `message_bytes` travel to a neighbour.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    each_bytes: tuple[float, ...]
    shared_bytes: tuple[float, ...]
    message_bytes: tuple[float, ...]
    static_bytes: tuple[float, ...]

    @property
    def times(self) -> StageTimes:
        """What the stages compute."""
        return StageTimes(self.forward_ms, self.backward_ms)


class Notes:
    """What one stage has seen of micro-batches of one size. The executor must measure meanwhile."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.forwards: list[tuple[Any, Any]] = []
        self.backwards: list[tuple[Any, Any]] = []
        self.held: list[int] = []

    @property
    def enough(self) -> bool:
        """Whether there are no more batches to be seen."""
        return len(self.backwards) > _TIMED

    def measured(self, stages: int, message_bytes: int, static_bytes: int) -> Measured:
        """What all ranks together have seen; all of them call it, between batches."""
        mine = (
            self._shortest_ms(self.forwards),
            self._shortest_ms(self.backwards),
            # The first to save what others save too is told to hold it.
            min(self.held),
            max(self.held) - min(self.held),
            message_bytes,
            static_bytes,
        )
        here = self.executor.stage_index
        table = [[number if stage == here else 0.0 for stage in range(stages)] for number in mine]
        return Measured(*map(tuple, highest_of_all(table, self.executor.device)))

    def _shortest_ms(self, spans: list[tuple[Any, Any]]) -> float:
        """Nobody else uses the device (Ada-Grouper §4.3): what takes longer has been held up by the host."""
        return min(self.executor.clock.elapsed_ms(start, end) for start, end in spans[1:])


class MeasuredStage(EngineStage):
    """Trains as ever, and takes notes."""

    def __init__(
        self, notes: Notes, engine: Any, boundary: Boundary, buffer_of: Callable[[Unit], int], evicts: bool
    ) -> None:
        super().__init__(engine, boundary, buffer_of, evicts)
        self._notes = notes

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Timed; then weighed."""
        clock = self._notes.executor.clock
        start = clock.mark()
        results = super().forward(unit, inputs)
        self._notes.forwards.append((start, clock.mark()))
        self._notes.held.append(self._notes.executor.store.nbytes(unit) + self._beside(unit))
        return results

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Timed."""
        clock = self._notes.executor.clock
        start = clock.mark()
        results = super().backward(unit, gradients)
        self._notes.backwards.append((start, clock.mark()))
        return results

    def _beside(self, unit: Unit) -> int:
        """Bytes that the engine keeps of a micro-batch until its backward, beside what autograd saves."""
        buffer = self._buffer_of(unit)
        storages: dict[int, torch.UntypedStorage] = {}
        for of_kind in self._engine.pipe_buffers.values():
            for tensor in tensors_of(of_kind[buffer]):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage
        return sum(storage.nbytes() for storage in storages.values())
