"""A forward-backward function for megatron-core whose stages swap as little as keeps each under a cap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evenpipe.megatron.adaptive.schedule import Tuning
from evenpipe.megatron.grouping import group_size
from evenpipe.megatron.schedule import PipelineSchedule
from evenpipe.megatron.stage import Batch
from evenpipe.runtime.executor import Observer
from evenpipe.schedule import Program, Size, Spec
from evenpipe.tuner.swapping import SwapLoop

__all__ = ["CappedSchedule"]


class CappedSchedule(PipelineSchedule):
    """A `PipelineSchedule` whose stages swap as `SwapLoop` has it: nothing where all fits.

    A call raises ScheduleError, on all ranks, where no swaps keep a stage under the cap. `tuning` may be replaced
    before the first batch: its limit, static bytes and log count.
    """

    def __init__(
        self,
        tuning: Tuning,
        schedule: str | Spec = "1f1b",
        observer: Observer | None = None,
        measure: bool = False,
        connected: Callable[[PipelineSchedule], None] = lambda schedule: None,
        group_size: int = 1,
    ) -> None:
        self.loop = SwapLoop(tuning.log)
        super().__init__(schedule, False, observer, measure, connected, group_size, swap=self.loop.limit)
        self.tuning = tuning

    def program(self, stages: int, micro_batches: int, chunks: int, settings: Any) -> Program:
        """Return the program of the next batch of so many micro-batches, with its swaps."""
        size = Size(stages, micro_batches, chunks, group_size(settings, self.group_size))
        return self.loop.programs(self.programs, size)(size)

    def _train(self, **arguments: Any) -> list[Any]:
        call = self._call(**arguments)
        losses = self._timed(self._carry_out, call)
        chunks, config = len(call.batch.model), call.batch.config
        size = Size(call.pipeline.size(), call.batch.num_microbatches, chunks, group_size(config, self.group_size))
        executor = self._executor(call.pipeline, call.batch)
        self.loop.end(executor, size, lambda: self.tuning.room(executor), self.programs)
        return losses

    def _weighs(self, batch: Batch) -> bool:
        return self.loop.weighs
