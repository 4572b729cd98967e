"""A forward-backward function for megatron-core that chooses its schedule by the run's own times and memory."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist

from evenpipe.megatron.adaptive.schedule import Tuning
from evenpipe.megatron.recomputing import obstacle
from evenpipe.megatron.searched import SearchedSchedule
from evenpipe.megatron.stage import Batch
from evenpipe.megatron.unsupported import refused_settings
from evenpipe.order_search.search import Effort
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import AUTO, Queues
from evenpipe.tuner.choosing import ChoiceLoop
from evenpipe.tuner.part_watch import PartWatch

__all__ = ["ChosenSchedule"]


class ChosenSchedule(SearchedSchedule):
    """A `PipelineSchedule` by the fastest schedule that fits the memory, chosen after two measured batches.

    The measured batches compute one micro-batch at a time. `schedule` says where model chunks are and whether backwards
    come in halves (`evenpipe.schedule.known.auto`); by default two chunks a stage lie in a V. The choice is among the
    schedules of that placement, and BPipe outside of a V, unless Megatron's settings rule it out. Where forwards and
    backwards are computed together, it is among those in Megatron's order. The choice is made once.
    """

    name: ClassVar[str] = AUTO
    loop: ChoiceLoop

    def _loop(self, watch: PartWatch, tuning: Tuning, effort: Effort) -> ChoiceLoop:
        return ChoiceLoop(watch, tuning.log, effort)

    def _joins_partners(self, batch: Batch) -> bool:
        in_a_v = "vee" in self.programs.spec.needed(len(batch.model))
        return not in_a_v and self._balances(batch.config)

    def _balances(self, config: Any) -> bool:
        """Return whether BPipe goes with these settings, in what is known of sizes before a batch."""
        if self._sizes_differ(config) and not self.programs.spec.fused:
            return False
        return next(refused_settings(config, bpipe=True), None) is None

    def _held_up(self, config: Any) -> Queues:
        held_up = super()._held_up(config)
        evicts_what_differs = self._sizes_differ(config) and self._balances(config)
        return "one" if held_up == "many" and evicts_what_differs else held_up

    def _executor(self, pipeline: dist.ProcessGroup, batch: Batch) -> Executor:
        config, spec = batch.config, self.programs.spec
        recomputes = config.recompute_granularity == "full" or obstacle(config, batch.model) is None
        sooner = ", a smaller --micro-batch-size, more stages or more tensor parallelism"
        fully = ", or --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        self.loop.allow(
            sooner if recomputes or spec.fused else fully,
            halves="split" in spec.needs and bool(getattr(config, "delay_wgrad_compute", False)),
            spec=spec,
        )
        return super()._executor(pipeline, batch)
