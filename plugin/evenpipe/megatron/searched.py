"""A forward-backward function for megatron-core whose order is searched for the run's own times while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch.distributed as dist

from evenpipe.megatron.adaptive.schedule import Tuning
from evenpipe.megatron.recomputing import obstacle
from evenpipe.megatron.schedule import PipelineSchedule
from evenpipe.megatron.stage import Batch
from evenpipe.megatron.unsupported import refused_settings
from evenpipe.order_search.search import USUAL, Effort
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.runtime.weight_gradients import queued_bytes
from evenpipe.schedule import SEARCHED, Need, Program, Schedule, Size, Spec, Unit
from evenpipe.tuner.part_watch import PartWatch
from evenpipe.tuner.searching import SearchLoop

__all__ = ["SearchedSchedule"]


class SearchedSchedule(PipelineSchedule):
    """A `PipelineSchedule` by an order that is searched for two batches that have been looked at, and for the memory.

    Until then it is V-Min where stages have two model chunks, in a V, and ZB-H1 where they have one, with weight
    gradients at once, and layers of three in four micro-batches are recomputed, unless Megatron's settings rule that
    out: `recomputing.obstacle`. Stages with one may evict to their partners, unless settings rule BPipe out. With
    `swaps`, all stages may swap to their hosts. All orders of a placement give the same losses and gradients. A call
    raises ScheduleError, on all ranks, where the memory holds no order. `iteration` is the number of the next batch,
    from 0; who loads a checkpoint sets it. `tuning` may be replaced before the first batch: its limit, static bytes,
    interval and log count. `loop` decides.
    """

    offers: ClassVar[frozenset[Need]] = PipelineSchedule.offers | {"times"}
    name: ClassVar[str] = SEARCHED

    def __init__(
        self,
        tuning: Tuning,
        observer: Observer | None = None,
        measure: bool = False,
        connected: Callable[[PipelineSchedule], None] = lambda schedule: None,
        effort: Effort = USUAL,
        schedule: Spec | None = None,
        swaps: bool = False,
    ) -> None:
        self._watch = watch = PartWatch(observer, queued=lambda: queued_bytes(self._model or ()))
        swap = 1.0 if swaps else None
        super().__init__(schedule or self.name, observer=watch, measure=measure, connected=connected, swap=swap)
        self.iteration = 0
        self.tuning = tuning
        self.loop = self._loop(watch, tuning, effort)

    def program(self, stages: int, micro_batches: int, chunks: int, settings: Any) -> Program:
        """Return the program of the next batch; Megatron's `settings` do not matter."""
        return self.loop.program(Size(stages, micro_batches, chunks), self.programs.queues)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a run needs to train by the same orders, as JSON has it; None before a search.

        It is the same on all ranks.
        """
        return self.loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch. Raises ValueError for what `state_dict` has not given."""
        self.loop.load_state_dict(state)

    def _loop(self, watch: PartWatch, tuning: Tuning, effort: Effort) -> SearchLoop:
        return SearchLoop(watch, tuning.interval, tuning.log, effort)

    def _train(self, **arguments: Any) -> list[Any]:
        call = self._call(**arguments)
        batch = call.batch
        size = Size(call.pipeline.size(), batch.num_microbatches, len(batch.model))
        self.loop.begin(self.iteration, size)
        executor = self._executor(call.pipeline, batch)
        self.loop.prepare(executor, size, self.programs.queues)
        losses = self._timed(self._carry_out, call)
        self.iteration += 1
        self.loop.end(executor, self.iteration, size, lambda: self.tuning.room(executor))
        return losses

    def _recomputes(self, batch: Batch, schedule: Schedule, stage: int) -> Callable[[Unit], bool]:
        recomputes = super()._recomputes(batch, schedule, stage)
        if self.loop.compares and obstacle(batch.config, batch.model) is None:
            recomputes = _three_in_four
        self._watch.recomputes = recomputes
        return recomputes

    def _swap(self) -> None:
        """Nothing: the loop has the executor swap where an order that it has found does."""

    def _joins_partners(self, batch: Batch) -> bool:
        if len(batch.model) > 1 or self._sizes_differ(batch.config):
            return False
        return next(refused_settings(batch.config, bpipe=True), None) is None

    def _weighs(self, batch: Batch) -> bool:
        return self.loop.weighs

    def _executor(self, pipeline: dist.ProcessGroup, batch: Batch) -> Executor:
        self.loop.join(self._joins_partners(batch), self.swap is not None)
        return super()._executor(pipeline, batch)


def _three_in_four(unit: Unit) -> bool:
    return unit.micro_batch % 4 > 0
