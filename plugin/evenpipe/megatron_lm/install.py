"""Wires EvenPipe into Megatron-LM's scripts: its flags into their parser, and a start once arguments are known."""

from __future__ import annotations

import functools
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from evenpipe.megatron.symbols import training_patch
from evenpipe.upstream import PatchSet
from evenpipe.upstream.ending import apply_or_end, end_job, end_where_torch_is_too_old
from evenpipe.upstream.imports import when_imported

if TYPE_CHECKING:
    from evenpipe.settings.config import EvenPipeConfig

    Listener = Callable[[Namespace, EvenPipeConfig, list[list[str]] | None], None]

__all__ = ["install", "script_patches"]


def install(listener: Listener | None = None) -> None:
    """Prepare this process for a script of Megatron-LM; nothing of Megatron or torch is imported for it.

    A `listener` is told the arguments, once Megatron and EvenPipe have checked them, what EvenPipe is asked for, and
    the kinds of layers of each part of the pipeline, if a layout says; then the job ends. It needs no GPU.

    Each patch is applied right after its module has been imported. A release of Megatron that EvenPipe does not know
    ends the job there, with one line.
    """
    end_where_torch_is_too_old()
    if os.environ.get("EVENPIPE_CPU") == "1":
        _cpu_mode()
    elif listener is not None or not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        when_imported("megatron.core", functools.partial(_cpu_mode_without_gpu, listener is not None))
    for patches in script_patches(listener):
        when_imported(patches.list()[0].targets[0].partition(":")[0], functools.partial(apply_or_end, patches))


def script_patches(listener: Listener | None = None) -> tuple[PatchSet, ...]:
    """Return the sets that `install` applies; each is there for one module."""
    flags = training_patch(
        "flags",
        "megatron.training.arguments:add_megatron_arguments",
        _with_our_flags,
        "Megatron's parser has no way to add flags from outside of the script",
    )
    start = training_patch(
        "start",
        "megatron.training.global_vars:set_global_variables",
        _start_first if listener is None else functools.partial(_tell, listener),
        "the first place that has all arguments, from flags, YAML or a checkpoint, before anything is started",
    )
    layout = training_patch(
        "layout",
        "megatron.training.arguments:validate_args",
        _lay_out_first,
        "a planned layout is an argument like others, which Megatron derives others from when it validates them",
    )
    return PatchSet("flags", [flags]), PatchSet("layout", [layout]), PatchSet("start", [start])


def _with_our_flags(original: Callable[[ArgumentParser], ArgumentParser], parser: ArgumentParser) -> ArgumentParser:
    from evenpipe.megatron_lm.flags import add_flags

    return add_flags(original(parser))


def _lay_out_first(original: Callable[..., Any], args: Namespace, *more: Any, **others: Any) -> Any:
    from evenpipe.megatron_lm.partition import lay_out
    from evenpipe.megatron_lm.start import ending_the_job

    with ending_the_job():
        lay_out(args)
    try:
        return original(args, *more, **others)
    except (AssertionError, ValueError) as error:
        end_job(_refused_by_megatron(error, args))


def _refused_by_megatron(error: Exception, args: Namespace) -> str:
    """Return one line for a check of Megatron's that failed: what it says, and the likely remedy."""
    at = extract_tb(error.__traceback__)[-1]
    found = f"{str(error) or at.line} ({os.path.basename(at.filename)}:{at.lineno}, Megatron's check of the flags)"
    processes, layers, stages = args.world_size, args.num_layers, args.pipeline_model_parallel_size
    replica = stages * args.tensor_model_parallel_size * args.context_parallel_size
    if processes % replica:
        remedy = (
            f"{processes} processes are no multiple of tensor × context × pipeline parallelism of {replica}: change "
            "torchrun's --nproc-per-node or --nnodes, or --pipeline-model-parallel-size"
        )
    elif layers and layers % stages:
        remedy = (
            f"{layers} layers are no multiple of {stages} stages: change --num-layers, or say which stage has which by "
            "--pipeline-model-parallel-layout (`evenpipe partition --megatron -- <flags>` finds one)"
        )
    else:
        remedy = "change the flag that it names"
    return f"{found}: {remedy}"


def _start_first(original: Callable[..., Any], args: Namespace, *more: Any, **others: Any) -> Any:
    from evenpipe.megatron_lm.flags import config_from
    from evenpipe.megatron_lm.partition import check_vocabulary
    from evenpipe.megatron_lm.start import ending_the_job, start

    with ending_the_job():
        start(args)
    result = original(args, *more, **others)
    with ending_the_job():
        check_vocabulary(config_from(args), args)
    return result


def _tell(listener: Listener, original: Callable[..., Any], args: Namespace, *more: Any, **others: Any) -> Any:
    from evenpipe.megatron_lm.partition import layer_kinds
    from evenpipe.megatron_lm.start import asked_for, ending_the_job

    with ending_the_job():
        config, _ = asked_for(args)
    if not (getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)):
        original(args, *more, **others)  # makes the tokenizer, which knows
    listener(args, config, layer_kinds(args))
    raise SystemExit(0)


def _cpu_mode_without_gpu(as_given: bool) -> None:
    """Megatron's scripts stop for want of a GPU before they get to their parser; `--help` needs none."""
    import torch

    if not torch.cuda.is_available():
        _cpu_mode(as_given)


def _cpu_mode(as_given: bool = False) -> None:
    from evenpipe.megatron_lm.cpu_scripts import install_cpu_mode

    install_cpu_mode(as_given)
