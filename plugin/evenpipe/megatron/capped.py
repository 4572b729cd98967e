"""A forward-backward function for megatron-core whose stages swap and recompute what keeps each under a cap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from evenpipe.megatron.adaptive.schedule import Tuning
from evenpipe.megatron.grouping import group_size
from evenpipe.megatron.recomputing import layers_of, obstacle, recomputing
from evenpipe.megatron.schedule import Call, PipelineSchedule
from evenpipe.megatron.stage import Batch
from evenpipe.runtime.executor import Observer
from evenpipe.schedule import Program, Size, Spec
from evenpipe.tuner.swapping import SwapLoop

__all__ = ["CappedSchedule"]


class CappedSchedule(PipelineSchedule):
    """A `PipelineSchedule` whose stages swap and recompute as `SwapLoop` has it: nothing where all fits.

    With `bpipe`, stages may send micro-batches to their partners too. Layers are recomputed by Megatron itself, as
    `--recompute-method block` has it, unless `obstacle` rules that out. A call raises ScheduleError, on all ranks,
    where nothing keeps a stage under the cap. `tuning` may be replaced before the first batch: its limit, static bytes
    and log count. `iteration` does not matter.
    """

    def __init__(
        self,
        tuning: Tuning,
        schedule: str | Spec = "1f1b",
        observer: Observer | None = None,
        measure: bool = False,
        connected: Callable[[PipelineSchedule], None] = lambda schedule: None,
        group_size: int = 1,
        bpipe: bool = False,
    ) -> None:
        self.loop = SwapLoop(tuning.log)
        super().__init__(schedule, False, observer, measure, connected, group_size, swap=self.loop.limit)
        self.bpipe = bpipe  # and yet `programs` move nothing: the loop says what does
        self.tuning = tuning
        self.iteration = 0

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a run needs to train by the same plan, as JSON has it; None before there is one.

        It is the same on all ranks.
        """
        return self.loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch: go by the plan that `state_dict` gave, of a run with the same model and settings."""
        self.loop.load_state_dict(state)

    def program(self, stages: int, micro_batches: int, chunks: int, settings: Any) -> Program:
        """Return the program of the next batch of so many micro-batches, with its swaps and moves."""
        size = Size(stages, micro_batches, chunks, group_size(settings, self.group_size))
        return self.loop.program(self.programs, size)

    def _train(self, **arguments: Any) -> list[Any]:
        call = self._call(**arguments)
        size, batch = self._size(call), call.batch
        self.loop.look(size)
        executor = self._executor(call.pipeline, batch)
        able = self.loop.weighs and obstacle(batch.config, batch.model) is None
        # Megatron's checkpoints compute without gradients first, and its routers count tokens with gradients only.
        self.loop.begin(executor, [layers_of(chunk) if able else [] for chunk in batch.model], repeats=False)
        losses = self._timed(self._carry_out, call)
        self.loop.end(executor, size, lambda: self.tuning.room(executor), self.programs)
        return losses

    def _carry_out(self, call: Call) -> list[Any]:
        counts = self.loop.layers(self.programs, self._size(call))
        with ExitStack() as stack:
            for chunk, layers in zip(call.batch.model, counts, strict=True):
                if layers:
                    stack.enter_context(recomputing(chunk, layers))
            return super()._carry_out(call)

    def _size(self, call: Call) -> Size:
        grouped = group_size(call.batch.config, self.group_size)
        return Size(call.pipeline.size(), call.batch.num_microbatches, len(call.batch.model), grouped)

    def _weighs(self, batch: Batch) -> bool:
        return self.loop.weighs
