"""EvenPipe in Megatron-Bridge: a callback for its ``pretrain``, and layouts for its recipes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from evenpipe.megatron.schedule_patches import in_place_of_megatron
from evenpipe.megatron.unsupported import refused_settings
from evenpipe.report.log_line import log_line, write_scalars
from evenpipe.runtime.resources import StageFigures, per_stage
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.upstream import UpstreamError

if TYPE_CHECKING:
    from evenpipe.megatron.schedule import PipelineSchedule

__all__ = ["EvenPipe", "layout_builder"]


def layout_builder(
    config: Any, *, cluster: str | None = None, memory_gib: float | None = None
) -> Callable[[int, int | None], list[list[str]]]:
    """Return what builds the layout of a recipe's pipeline, for Bridge to call when stages are overridden::

        config.model._pipeline_model_parallel_layout_builder = layout_builder(config, cluster="8x8-h100")

    It takes the numbers of stages and of virtual stages, and returns the kinds of layers of each part, which the
    planner finds for the recipe's model and batch as they are then. cluster, memory_gib: as `evenpipe.fit` has them.
    """
    from evenpipe.fitting import layout_for

    return partial(layout_for, config, on=cluster, memory_gib=memory_gib)


class EvenPipe:
    """Has Megatron-Bridge train under a schedule of EvenPipe's::

        pretrain(config, forward_step, callbacks=[EvenPipe(bpipe=True)])

    The arguments are as `--evenpipe-schedule`, `--bpipe`, `--group-size` and `--evenpipe-swap`. Bridge asks for its
    schedule before it tells any callback that training starts, so Megatron's choice is replaced as soon as this is
    made, and put back when training has ended. One instance is for one `pretrain`.

    Raises ConfigError for settings that cannot be, and ValueError, in one line, for what does not go together: here, or
    when training starts.
    """

    def __init__(
        self, schedule: str = "1f1b", *, bpipe: bool = False, group_size: int = 1, swap: float | None = None
    ) -> None:
        config = EvenPipeConfig.of(schedule=schedule, bpipe=bpipe, group_size=group_size, swap=swap)
        if config.streams:
            raise ValueError(
                f"schedule={schedule}: Bridge steps and saves by itself, which a pipeline without flushes has to "
                "delay: use 1f1b or kfkb, or 2bw with scripts of Megatron-LM"
            )
        if "vee" in config.spec.needs:
            raise ValueError(
                f"schedule={schedule}: Bridge makes model chunks itself, which lie otherwise in a V: use scripts of "
                "Megatron-LM, or 1f1b"
            )
        if config.group_size == "auto":
            raise ValueError("group_size=auto: Bridge saves nothing of what was measured: give a number")
        from evenpipe.megatron.schedule import PipelineSchedule

        if config.swap == "auto":
            raise ValueError("swap=auto: Bridge shows its optimizer, whose memory counts, to nobody: give a share")
        self.schedule: PipelineSchedule = PipelineSchedule(config.spec, bpipe, group_size=config.group_size, swap=swap)
        self._bpipe = bpipe
        self._patches = in_place_of_megatron(self.schedule)
        self._patches.apply()

    def on_train_start(self, context: Any) -> None:
        """Called by Bridge, on all ranks: model and optimizer are made, their weights loaded."""
        config = context.state.cfg
        for refusal in refused_settings(
            config.model, self._bpipe, "split" in self.schedule.needs, self.schedule.swap is not None
        ):
            raise ValueError(str(refusal))
        if getattr(getattr(config, "inprocess_restart", None), "enabled", False):
            raise ValueError(
                "inprocess_restart would go on with links that hold half of a batch: turn it off, and let torchrun "
                "restart the processes (--max-restarts)"
            )
        if config.model.pipeline_model_parallel_size < 2:
            raise ValueError(
                f"pipeline_model_parallel_size={config.model.pipeline_model_parallel_size} is no pipeline: use at "
                "least 2 stages, or leave EvenPipe out"
            )
        self.schedule.measure = self._is_logged(context, context.state.train_state.step + 1)

    def on_train_step_end(self, context: Any) -> None:
        """Called by Bridge, on all ranks, after each step: shows the figures of those that it logs."""
        executor = self.schedule.executor
        if executor is None:
            raise UpstreamError(
                "Megatron-Bridge has not asked megatron-core for its schedule, so that EvenPipe's was not used: train "
                "with pretrain() of a release whose training loop calls get_forward_backward_func"
            )
        # Bridge counts a step after it has told of its end.
        iteration = context.state.train_state.step + 1
        if executor.measure:
            stages = context.state.cfg.model.pipeline_model_parallel_size
            figures = per_stage(StageFigures.of(executor), executor.stage_index, stages, executor.device)
            if dist.get_rank() == dist.get_world_size() - 1:
                # Bridge has these on its last rank only.
                state = context.state
                print(f" [evenpipe] {log_line(iteration, figures)}", flush=True)
                write_scalars(figures, iteration, state.tensorboard_logger, state.wandb_logger)
        self.schedule.measure = self._is_logged(context, iteration + 1)
        executor.counter.reset_peak()

    def on_train_end(self, context: Any) -> None:
        """Called by Bridge, on all ranks: what follows, such as a last evaluation, is Megatron's own."""
        self.schedule.close()
        self._patches.revert()

    @staticmethod
    def _is_logged(context: Any, iteration: int) -> bool:
        return bool(iteration % context.state.cfg.logger.log_interval == 0)
