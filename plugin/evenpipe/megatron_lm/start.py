"""Checks, places and plugs in what EvenPipe's flags ask for, once the arguments of a Megatron-LM script are known."""

from __future__ import annotations

import functools
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from evenpipe.megatron.symbols import OVERLAPPING
from evenpipe.megatron.unsupported import overlaps
from evenpipe.megatron_lm.checks import check, spec_of, stays_stock, warnings
from evenpipe.megatron_lm.flags import ArgumentError, config_from
from evenpipe.megatron_lm.partition import layer_kinds, planned
from evenpipe.runtime.meeting import NotMet, meeting_of
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import flag
from evenpipe.upstream import PatchSet, UpstreamError
from evenpipe.upstream.ending import end_job, end_with_the_first_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evenpipe.layouts.written import WrittenLayout
    from evenpipe.megatron.schedule import PipelineSchedule
    from evenpipe.megatron_lm.link_table import LinkTable
    from evenpipe.tracing.iteration import IterationTrace

__all__ = ["asked_for", "ending_the_job", "start", "trace_of"]


#: Megatron's own, of which links and messages are made.
_COMPARED: Final = (
    *("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "micro_batch_size"),
    *("global_batch_size", "seq_length", "hidden_size", "num_layers", "num_layers_per_virtual_pipeline_stage"),
    *("num_virtual_stages_per_pipeline_rank", "expert_model_parallel_size", "sequence_parallel", "bf16", "fp16"),
    "overlap_moe_expert_parallel_comm",  # then an order has one forward more ahead
)


def start(args: Namespace) -> None:
    """Plug in what the EvenPipe flags in `args` ask for; without any, leave everything as it is.

    Without any, other ranks are told of it, which may have some, and nobody is waited for.

    Changes RANK and `args.rank` where ranks are placed, so torch.distributed must not have been started yet. Raises
    ArgumentError for what does not go together, and UpstreamError.
    """
    config, plan = asked_for(args)
    if config.active:
        _plug_in(config, args, plan)
    else:
        with suppress(NotMet):
            meeting_of(os.environ).tell(None)


def asked_for(args: Namespace) -> tuple[EvenPipeConfig, WrittenLayout | None]:
    """Return the settings that the EvenPipe flags in `args` ask for, and their plan, if any.

    None are asked for where --evenpipe auto has nothing to choose, which rank 0 says. Raises ArgumentError for flags
    that do not go together.
    """
    config = config_from(args)
    plan = planned(config, args)
    check(config, args)
    if (why := stays_stock(config, args)) is not None:
        if args.rank == 0:
            print(f" [evenpipe] {config.schedule}: trains by Megatron's own schedule: {why}", flush=True)
        return EvenPipeConfig.of(), None
    return config, plan


@contextmanager
def ending_the_job() -> Iterator[None]:
    """End the job with one line if ArgumentError or UpstreamError is raised inside."""
    try:
        yield
    except (ArgumentError, UpstreamError) as error:
        end_job(str(error))


def _plug_in(config: EvenPipeConfig, args: Namespace, plan: WrittenLayout | None) -> None:
    # Imported here: a run without EvenPipe's flags does not pay for it.
    from evenpipe.megatron.schedule import PipelineSchedule, in_place_of_megatron
    from evenpipe.megatron_lm.delayed import delayed_gradients
    from evenpipe.megatron_lm.link_table import LinkTable
    from evenpipe.megatron_lm.log import TrainingLog, log_patches
    from evenpipe.megatron_lm.placing import place_process

    unplaced = dict(os.environ)
    placement = place_process(args, config, os.environ)
    store = _agree(unplaced, config, args)
    observer = trace_of(config.trace, config.trace_iteration, args) if config.trace is not None else None
    report = functools.partial(_report, LinkTable(args, config, placement), store)
    schedule: PipelineSchedule
    called: Callable[..., Any] | None = None
    steps, more = None, []
    if config.streams:
        from evenpipe.megatron.two_bw import StreamSchedule
        from evenpipe.megatron_lm.two_bw.training import TwoBWLoop

        schedule = stream = StreamSchedule(config.bpipe, observer, connected=report, schedule=config.spec)
        training = TwoBWLoop(stream, args, config.one_version, config.delay_correction)
        steps, more = training.step_log, [training.patches()]
    elif config.measures or config.swap == "auto":
        from evenpipe.megatron_lm.measured import measured_patches, training_for

        measured = training_for(config, args, observer, report)
        schedule, called, more = measured.schedule, measured, [measured_patches(measured)]
    else:
        assert config.group_size != "auto", "that is measured"
        schedule = PipelineSchedule(
            config.spec, config.bpipe, observer, connected=report, group_size=config.group_size, swap=config.swap
        )
    needs = spec_of(config, args).needed(args.virtual_pipeline_model_parallel_size or 1)
    if "split" in needs:
        more = [*more, delayed_gradients()]
    if overlaps(args):
        more = [*more, PatchSet("combined steps", [], OVERLAPPING)]
    if "vee" in needs:
        from evenpipe.megatron.vee import vee_patches
        from evenpipe.megatron_lm.chunks import chunks_in_a_vee

        more = [*more, vee_patches(), chunks_in_a_vee()]
    compare = None
    if plan is not None:
        from evenpipe.megatron.planned_layout import half_layers
        from evenpipe.megatron_lm.predicted_vs_measured import LayoutComparison, comparison_patches

        comparison = LayoutComparison(plan, args)
        compare, more = comparison.tell, [*more, comparison_patches(comparison), half_layers(plan)]
    log = TrainingLog(schedule, args, steps, compare)
    for patches in (in_place_of_megatron(schedule, called), log_patches(log), *more):
        patches.apply()
    from evenpipe.runtime.heartbeat import silent_peer

    end_with_the_first_error(silent_peer)
    if args.rank == 0:
        for line in warnings(config, args):
            _complain(line)


def _report(table: LinkTable, store: Any, schedule: PipelineSchedule) -> None:
    """Have `table` report of `schedule`'s links; `store`, in which ranks met, is kept until now."""
    table.report(schedule)


def _agree(environ: Mapping[str, str], config: EvenPipeConfig, args: Namespace) -> Any:
    """Return the store in which this rank has compared with the others how they were started.

    Raises ArgumentError with the first rank that differs.

    `environ` has the rank that the launcher gave: ranks that differ may have been placed in other ways.
    """
    from megatron.core import __version__ as megatron_version

    from evenpipe import __version__

    settings = {flag(name): str(value) for name, value in config.model_dump(exclude={"trace"}).items()}
    settings |= {f"--{name.replace('_', '-')}": str(getattr(args, name, None)) for name in _COMPARED}
    settings["--pipeline-model-parallel-layout"] = str(layer_kinds(args))
    row = {"EvenPipe": __version__, "megatron-core": str(megatron_version), **settings}
    try:
        return meeting_of(environ).agree(row, timedelta(minutes=args.distributed_timeout_minutes), _complain)
    except NotMet as error:
        raise ArgumentError(str(error)) from None


def _complain(line: str) -> None:
    print(f"evenpipe: warning: {line}", file=sys.stderr, flush=True)


def trace_of(path: Path, iteration: int | None, args: Namespace) -> IterationTrace:
    """Return an observer that records the timeline of `iteration` into `path`.

    Iterations count as in Megatron's log; None is the second of this run. `args` are Megatron's: `rank`, and
    `curr_iteration`, which Megatron sets before each iteration::

        PipelineSchedule(name, bpipe, observer=trace_of(config.trace, config.trace_iteration, args))
    """
    from megatron.core import parallel_state

    from evenpipe.megatron_lm.log import say
    from evenpipe.tracing.iteration import IterationTrace, Place, TracedJob

    def place() -> Place:
        data, context = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
        tensor = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        shown = f", context {context}" if parallel_state.get_context_parallel_world_size() > 1 else ""
        return Place((data, context, tensor, stage), f"stage {stage}, data {data}{shown}, tensor {tensor}")

    return IterationTrace(path, iteration, TracedJob(args.rank, lambda: args.curr_iteration + 1, place, say))
