"""A forward-backward function for megatron-core that chooses its schedule by the run's own times and memory."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist

from evenpipe.megatron.adaptive.schedule import Tuning
from evenpipe.megatron.recomputing import obstacle
from evenpipe.megatron.searched import SearchedSchedule
from evenpipe.megatron.stage import Batch
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import AUTO
from evenpipe.schedule.search.search import Effort
from evenpipe.tuner.choosing import ChoiceLoop
from evenpipe.tuner.part_watch import PartWatch

__all__ = ["ChosenSchedule"]


class ChosenSchedule(SearchedSchedule):
    """A `PipelineSchedule` by the fastest schedule that fits the memory, chosen after two measured batches.

    The measured batches compute one micro-batch at a time. Stages with two model chunks choose among the schedules of
    a V; stages with one choose among all others, and BPipe, unless Megatron's settings rule it out. The choice is made
    once.
    """

    name: ClassVar[str] = AUTO
    loop: ChoiceLoop

    def _loop(self, watch: PartWatch, tuning: Tuning, effort: Effort) -> ChoiceLoop:
        return ChoiceLoop(watch, tuning.log, effort)

    def _executor(self, pipeline: dist.ProcessGroup, batch: Batch) -> Executor:
        config = batch.config
        recomputes = config.recompute_granularity == "full" or obstacle(config, batch.model) is None
        self.loop.allow(
            ", a smaller --micro-batch-size, more stages or more tensor parallelism"
            if recomputes
            else ", or --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            halves=bool(getattr(config, "delay_wgrad_compute", False)),
        )
        return super()._executor(pipeline, batch)
