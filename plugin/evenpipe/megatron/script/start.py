"""Checks, places and plugs in what EvenPipe's flags ask for, once the arguments of a Megatron-LM script are known."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenpipe.megatron.script.checks import check
from evenpipe.megatron.script.flags import ArgumentError, config_from
from evenpipe.megatron.script.partition import planned
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.upstream import UpstreamError
from evenpipe.upstream.apex import wrong_apex
from evenpipe.upstream.ending import end_job, end_with_the_first_error

if TYPE_CHECKING:
    from evenpipe.partition.layouts.written import WrittenLayout
    from evenpipe.tracing.iteration import IterationTrace

__all__ = ["asked_for", "ending_the_job", "layer_kinds", "start", "trace_of"]


def start(args: Namespace) -> None:
    """Plug in what the EvenPipe flags in `args` ask for; without any, leave everything as it is.

    Changes RANK and `args.rank` where ranks are placed, so torch.distributed must not have been started yet. Raises
    ArgumentError for what does not go together, and UpstreamError.
    """
    config, plan = asked_for(args)
    if config.active:
        _plug_in(config, args, plan)


def asked_for(args: Namespace) -> tuple[EvenPipeConfig, WrittenLayout | None]:
    """What the EvenPipe flags in `args` ask for, and its plan. Raises ArgumentError for what does not go together."""
    config = config_from(args)
    plan = planned(config, args)
    check(config, args)
    return config, plan


def layer_kinds(args: Namespace) -> list[list[str]] | None:
    """Of each part of the pipeline, in the model's order, as the layout in `args` says; None without one."""
    layout: Any = getattr(args, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str):
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        layout = PipelineParallelLayerLayout.parse_str_to_list(layout)
    return layout and [[getattr(kind, "name", kind) for kind in part] for part in layout]


@contextmanager
def ending_the_job() -> Iterator[None]:
    """What is refused inside ends the job with one line."""
    try:
        yield
    except (ArgumentError, UpstreamError) as error:
        end_job(str(error))


def _plug_in(config: EvenPipeConfig, args: Namespace, plan: WrittenLayout | None) -> None:
    # Imported here: a run without EvenPipe's flags does not pay for it.
    from evenpipe.megatron.schedule import PipelineSchedule, in_place_of_megatron
    from evenpipe.megatron.script.link_table import LinkTable
    from evenpipe.megatron.script.log import TrainingLog, log_patches
    from evenpipe.megatron.script.placing import place_process

    placement = place_process(args, config, os.environ)
    observer = trace_of(config.trace, config.trace_iteration, args) if config.trace is not None else None
    report = LinkTable(args, config, placement).report
    schedule: PipelineSchedule
    called: Callable[..., Any] | None = None
    steps, more = None, []
    if config.streams:
        from evenpipe.megatron.script.two_buffered.training import TwoBufferedTraining
        from evenpipe.megatron.two_buffered import StreamSchedule

        schedule = stream = StreamSchedule(config.bpipe, observer, connected=report, schedule=config.spec)
        training = TwoBufferedTraining(stream, args)
        steps, more = training.steps, [training.patches()]
    elif config.group_size == "auto":
        from evenpipe.megatron.script.adaptive import AdaptiveTraining, adaptive_patches

        tuned = AdaptiveTraining(config, args, observer, report)
        schedule, called, more = tuned.schedule, tuned, [adaptive_patches(tuned)]
    else:
        schedule = PipelineSchedule(config.spec, config.bpipe, observer, connected=report, group_size=config.group_size)
    compare = None
    if plan is not None:
        from evenpipe.megatron.planned_layout import half_layers
        from evenpipe.megatron.script.truth import Truth, truth_patches

        truth = Truth(plan, args)
        compare, more = truth.tell, [*more, truth_patches(truth), half_layers(plan)]
    log = TrainingLog(schedule, args, steps, compare)
    for patches in (in_place_of_megatron(called or schedule), log_patches(log), *more):
        patches.apply()
    end_with_the_first_error()
    if args.rank == 0 and (apex := wrong_apex()) is not None:
        print(f"evenpipe: warning: {apex}", file=sys.stderr, flush=True)


def trace_of(path: Path, iteration: int | None, args: Namespace) -> IterationTrace:
    """What records the timeline of `iteration`, as Megatron's log counts (None: the second of this run), into `path`.

    `args` are Megatron's: `rank`, and `curr_iteration`, which Megatron sets before each iteration::

        PipelineSchedule(name, bpipe, observer=trace_of(config.trace, config.trace_iteration, args))
    """
    from megatron.core import parallel_state

    from evenpipe.megatron.script.log import say
    from evenpipe.tracing.iteration import IterationTrace, Place, TracedJob

    def place() -> Place:
        data, context = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
        tensor = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        shown = f", context {context}" if parallel_state.get_context_parallel_world_size() > 1 else ""
        return Place((data, context, tensor, stage), f"stage {stage}, data {data}{shown}, tensor {tensor}")

    return IterationTrace(path, iteration, TracedJob(args.rank, lambda: args.curr_iteration + 1, place, say))
