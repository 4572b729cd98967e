"""Megatron's log, TensorBoard and Weights & Biases gain what each stage held, moved and waited for."""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from evenpipe.megatron.supported import PARALLEL_STATE, Changes, expected, members
from evenpipe.megatron.symbols import training_expected, training_patch
from evenpipe.report.log_line import kept_line, log_line, write_scalars
from evenpipe.runtime.resources import StageFigures, per_stage
from evenpipe.upstream import PatchSet

if TYPE_CHECKING:
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.two_bw.log import StepLog

__all__ = ["TrainingLog", "log_patches", "say", "say_on_last_rank", "show_figures"]

_CALLED: Final = training_expected(
    "megatron.training:print_rank_last",
    "megatron.training:get_tensorboard_writer",
    "megatron.training:get_wandb_writer",
)
#: Of the log, the trace, the table of links, and of what is said of a plan.
_OF_CORE: Final[dict[str, Changes]] = {
    **members(
        PARALLEL_STATE,
        (
            *("get_pipeline_model_parallel_rank", "get_pipeline_model_parallel_world_size"),
            *("get_context_parallel_rank", "get_context_parallel_world_size", "get_tensor_model_parallel_rank"),
        ),
        "()",
    ),
    f"{PARALLEL_STATE}:get_data_parallel_rank": {
        "0.14": "(with_context_parallel=False, partial_data_parallel=False)",
        "0.19": "(with_context_parallel=False, with_gtp_remat=True, partial_data_parallel=False)",
    },
    f"{PARALLEL_STATE}:get_pipeline_model_parallel_group": "(check_initialized=True)",
    "megatron.core.num_microbatches_calculator:get_num_microbatches": "()",
    "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.parse_str_to_list": (
        "(layout_str)"
    ),
}


def say(line: str) -> None:
    """Show a line of EvenPipe's."""
    print(f" [evenpipe] {line}", flush=True)


def say_on_last_rank(line: str) -> None:
    """The same, but by the last rank alone, as Megatron's own log is."""
    from megatron.training import print_rank_last

    print_rank_last(f" [evenpipe] {line}")


def log_patches(log: TrainingLog) -> PatchSet:
    """Has Megatron's `training_log`, which is called after every iteration that was not skipped, call `log`."""
    ours = training_patch(
        "log",
        "megatron.training.training:training_log",
        functools.partial(_followed_by_ours, log),
        "Megatron's log and its writers take no figures from outside of the function",
    )
    return PatchSet("log", [ours], [*_CALLED, *expected(_OF_CORE)])


class TrainingLog:
    """Measures the iterations that Megatron logs, and those only: the others pay nothing.

    `args` are Megatron's. Make it before the first batch, and apply what it patches::

        log_patches(TrainingLog(schedule, args)).apply()

    `schedule.measure` is the log's from then on. An iteration that is logged right after one that Megatron was told to
    skip has not been measured, and gets no line. With 2BW, the log that `steps` gives gathers the figures in the
    background, and shows them an iteration later. `compare` is given this process' figures, its stage and device once,
    on all ranks, when there are some that count.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        args: Namespace,
        steps: Callable[[], StepLog | None] | None = None,
        compare: Callable[[StageFigures, int, Any], None] | None = None,
    ) -> None:
        self._schedule = schedule
        self._args = args
        self._steps = steps
        self._compare = compare
        # Some releases log the first iteration of a run, whatever its number, which is not known before it ends.
        schedule.measure = True
        self._first = True

    def iteration_ended(self, iteration: int, is_first: bool) -> None:
        """Called by all ranks after every iteration; `is_first` are those that Megatron logs whatever their number."""
        executor = self._schedule.executor
        if executor is None:
            return
        from megatron.core import parallel_state

        logged = is_first or self._is_logged(iteration)
        steps = None if self._steps is None else self._steps()
        if steps is not None:
            steps.iteration_ended(iteration, parallel_state.get_pipeline_model_parallel_rank())
        if executor.measure and logged:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            stages = parallel_state.get_pipeline_model_parallel_world_size()
            figures = StageFigures.of(executor)
            if steps is not None:
                steps.gather(iteration, figures, stage, stages, executor.device)
            else:
                show_figures(iteration, per_stage(figures, stage, stages, executor.device))
            # The first iteration loads kernels and fills caches, so it counts only where there is no other.
            if self._compare is not None and (not self._first or iteration >= self._args.train_iters):
                self._compare(figures, stage, executor.device)
                self._compare = None
            if self._first and executor.store.lasting_bytes and _is_first_replica():
                say(kept_line(stage, executor.store.lasting_bytes))
            self._first = False
        if steps is not None and logged:
            steps.logged(iteration, resets=not is_first)
        if steps is not None and iteration >= self._args.train_iters:
            steps.close()
        # A batch of 2BW begins in the iteration before its own.
        ahead = (iteration + 1,) if steps is None else (iteration + 1, iteration + 2)
        self._schedule.measure = any(map(self._is_logged, ahead))
        if self._schedule.measure:
            executor.counter.reset_peak()

    def _is_logged(self, iteration: int) -> bool:
        return bool(iteration % self._args.log_interval == 0)


def _followed_by_ours(log: TrainingLog, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    log.iteration_ended(given["iteration"], given.get("is_first_iteration", False))
    return result


def _is_first_replica() -> bool:
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return bool(replica == 0 and parallel_state.get_tensor_model_parallel_rank() == 0)


def show_figures(iteration: int, stages: Sequence[StageFigures]) -> None:
    """Log and write the figures of an iteration; only Megatron's last rank does."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    say_on_last_rank(log_line(iteration, stages))
    # Megatron has these on its last rank only.
    write_scalars(stages, iteration, get_tensorboard_writer(), get_wandb_writer())
