"""Checks that EvenPipe's settings go together with Megatron's arguments, before anything is started."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Final

import torch

from evenpipe.megatron.grouping import group_size
from evenpipe.megatron.unsupported import (
    Refusal,
    overlaps,
    refused_in_a_v,
    refused_settings,
    refused_with_search,
    refused_with_tuning,
    unlike_a_v,
)
from evenpipe.megatron.vee import check_placement
from evenpipe.megatron.without_flushes import refused_arguments
from evenpipe.megatron_lm.delayed import too_old_engine
from evenpipe.megatron_lm.flags import ArgumentError
from evenpipe.report.files import check_writable
from evenpipe.schedule import AUTO, Need, Programs, ScheduleError, Size, Spec, check_offers, fused_form
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.contradictions import CONTRADICTIONS, CONTRADICTIONS_ON_CPU, contradiction_in, one_group
from evenpipe.settings.spelling import FLAGS, flag
from evenpipe.train.engines import ENGINES
from evenpipe.upstream.installed import wrong_apex

__all__ = ["check", "spec_of", "stays_stock", "warnings"]


_GROUP_FLAG: Final = "--microbatch-group-size-per-virtual-pipeline-stage"


def check(config: EvenPipeConfig, args: Namespace) -> None:
    """Raise ArgumentError, with one line that names both flags, for the first thing that does not go together.

    `args` are Megatron's arguments, parsed and validated.
    """
    # Rank 0 writes the trace; the other nodes need not have its folder.
    if config.trace is not None and args.rank == 0 and (obstacle := check_writable(config.trace)) is not None:
        raise ArgumentError(f"{flag('trace')} {config.trace}: {obstacle}")
    rows = CONTRADICTIONS if torch.cuda.is_available() else (*CONTRADICTIONS, *CONTRADICTIONS_ON_CPU)
    if (line := contradiction_in(config, FLAGS, rows)) is not None:
        raise ArgumentError(line)
    swap = None if config.swap == "auto" else config.swap
    try:
        check_offers(config.spec, ENGINES["evenpipe"].offers | {"times"}, ENGINES["evenpipe"].called, swap)
        if config.spec.table is not None:
            _fit_table(config.spec, args)
    except ScheduleError as error:
        said = str(error).removeprefix(f"schedule={config.spec.name}: ")
        raise ArgumentError(f"{flag('schedule')} {config.schedule}: {said}") from None
    if stays_stock(config, args) is not None:
        return
    if config.active:
        asked = _asked(config)
        try:
            spec = spec_of(config, args)
        except ScheduleError as error:
            said = str(error).removeprefix(f"schedule={config.spec.name}: ")
            raise ArgumentError(f"{asked} with --overlap-moe-expert-parallel-comm: {said}") from None
        for line in _with_megatrons(config, args):
            raise ArgumentError(line)
        streaming = refused_arguments(args, not config.delayed, config.bpipe) if config.streams else ()
        with_tuning = refused_with_tuning(args) if config.group_size == "auto" else ()
        with_search = refused_with_search(args) if "times" in config.spec.needs else ()
        settings = refused_settings(args, config.bpipe, "split" in spec.needs, config.swap is not None)
        in_a_v = refused_in_a_v(args) if "vee" in _needed(config, args) else ()
        refused = (*settings, *streaming, *with_tuning, *with_search, *in_a_v)
        for refusal in refused or _refused_capture(config, args):
            raise ArgumentError(f"{asked}: {refusal.why}: {refusal.remedy}")


def stays_stock(config: EvenPipeConfig, args: Namespace) -> str | None:
    """Return why a run that is to choose its schedule has nothing to choose; None for others."""
    if config.schedule != AUTO:
        return None
    from evenpipe.megatron_lm.auto import why_stock

    return why_stock(args)


def warnings(config: EvenPipeConfig, args: Namespace) -> Iterator[str]:
    """Return a line for each thing that is allowed, and hardly meant."""
    if (line := one_group(config.spec, config.group_size, _size(args, 1).micro_batches, FLAGS)) is not None:
        yield line
    if (apex := wrong_apex()) is not None:
        yield apex
    if "split" in spec_of(config, args).needs and (older := too_old_engine(args)) is not None:
        yield older


def spec_of(config: EvenPipeConfig, args: Namespace) -> Spec:
    """Return the schedule that a run with Megatron's arguments `args` trains by.

    Raises ScheduleError where it cannot compute forwards and backwards together, as they ask for.
    """
    if config.schedule == AUTO:
        from evenpipe.megatron_lm.auto import auto_spec  # with what searches, which others do without

        return auto_spec(args, _size(args, 1).micro_batches)
    if not overlaps(args):
        return config.spec
    return fused_form(config.spec, args.virtual_pipeline_model_parallel_size or 1)


def _fit_table(spec: Spec, args: Namespace) -> None:
    """Raise ScheduleError where a table is of another size than the run, whose batches are then all of one.

    Or of a placement that Megatron's layers cannot have.
    """
    size = spec.fitted(_size(args, 1))
    check_placement(spec.places(size))


def _needed(config: EvenPipeConfig, args: Namespace) -> frozenset[Need]:
    return spec_of(config, args).needed(args.virtual_pipeline_model_parallel_size or 1)


def _size(args: Namespace, group: int) -> Size:
    batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    chunks = args.virtual_pipeline_model_parallel_size or 1
    return Size(args.pipeline_model_parallel_size, batches, chunks, group_size(args, group))


def _refused_capture(config: EvenPipeConfig, args: Namespace) -> Iterator[Refusal]:
    from evenpipe.megatron.captured import refused_capture  # it imports Megatron's schedules

    if config.streams or config.group_size == "auto" or "times" in config.spec.needs:  # refused with any graphs
        return
    size = _size(args, config.group_size)
    refusal = refused_capture(args, lambda: Programs(spec_of(config, args), config.bpipe)(size).schedule)
    if refusal is not None:
        yield refusal


def _with_megatrons(config: EvenPipeConfig, args: Namespace) -> Iterator[str]:
    """A line for each of Megatron's arguments that cannot be what it is."""
    asked = _asked(config)
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    needs = _needed(config, args)
    several_chunks = "chunks" in needs or config.spec.chunked is not None
    together = args.micro_batch_size * args.data_parallel_size
    batches = args.global_batch_size // together
    if config.streams:
        size, samples = "--global-batch-size", args.global_batch_size
        if args.rampup_batch_size is not None:
            size, samples = "--rampup-batch-size", int(args.rampup_batch_size[0])
        if samples // together < stages:
            yield (
                f"{flag('schedule')} {config.schedule}: {size} {samples} makes {samples // together} micro-batches, "
                f"fewer than --pipeline-model-parallel-size {stages}: make it at least {stages * together}, or use 1f1b"
            )
    if stages < 2:
        yield f"{asked}: --pipeline-model-parallel-size {stages} is no pipeline: use at least 2 stages"
    if chunks is not None and not several_chunks:
        yield (
            f"{asked}: has one model chunk a stage, but --num-layers-per-virtual-pipeline-stage, "
            f"--num-virtual-stages-per-pipeline-rank or the layout gives it {chunks}: use 1f1b, or no virtual stages"
        )
    if chunks is not None and config.spec.chunks[1] not in (None, 1, chunks):
        yield (
            f"{asked}: has {config.spec.chunks[1]} model chunks a stage, but --num-layers-per-virtual-pipeline-stage, "
            f"--num-virtual-stages-per-pipeline-rank or the layout gives it {chunks}: use "
            f"--num-virtual-stages-per-pipeline-rank {config.spec.chunks[1]}"
        )
    if "vee" in needs:
        yield from (f"{asked}: {line}" for line in unlike_a_v(args))
    if chunks is None and "chunks" in needs:
        yield (
            f"{asked}: needs --num-layers-per-virtual-pipeline-stage or "
            "--num-virtual-stages-per-pipeline-rank: give one of them, or use 1f1b"
        )
    if chunks is not None and args.rampup_batch_size is None and "vee" not in needs:
        own = group_size(args, 1)
        group, named = (stages, "") if own == 1 else (own, f" {_GROUP_FLAG} {own}, none smaller than")
        if not stages <= group <= batches or 0 < batches % group < stages:
            yield (
                f"{asked}: --global-batch-size {args.global_batch_size} makes {batches} micro-batches, but interleaved "
                f"stages take groups of{named} --pipeline-model-parallel-size {stages}: make it a multiple of "
                f"{group * together}, or choose another {_GROUP_FLAG}"
            )
    if getattr(args, "inprocess_restart", False):
        yield (
            f"{asked}: --inprocess-restart would go on with links that hold half of a batch: leave one out, and let "
            "torchrun restart the processes (--max-restarts)"
        )
    last = args.train_iters
    if config.trace_iteration is not None and last is not None and config.trace_iteration > last:
        yield (
            f"{flag('trace_iteration')} {config.trace_iteration}: comes after --train-iters {last}: "
            "choose an earlier one"
        )


def _asked(config: EvenPipeConfig) -> str:
    """Return the flag that asked for EvenPipe, as the user wrote it."""
    if config.group_size == "auto":
        return f"{flag('group_size')} auto"
    if config.schedule is not None:
        return f"{flag('schedule')} {config.schedule}"
    if config.bpipe:
        return flag("bpipe")
    setting = "partition" if config.swap is None else "swap"
    return FLAGS.head(setting, getattr(config, setting))
