"""The run that a line of Megatron's flags describes, as far as it can be told without Megatron-LM."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NamedTuple

from evenpipe.planner.arguments import FlagError, Pipelined, model_of, parse_flags, run_of
from evenpipe.planner.descriptions import Model
from evenpipe.planner.run import Run
from evenpipe.recipes.layouts import kinds_of
from evenpipe.settings.config import ConfigError, EvenPipeConfig
from evenpipe.settings.contradictions import CONTRADICTIONS, contradiction_in
from evenpipe.settings.spelling import FLAGS, flag

__all__ = ["Described", "described_by", "settings_of"]


class Described(NamedTuple):
    """``unread``: flags that only Megatron's own parser can judge. ``run``: of the given number of GPUs."""

    model: Model
    run: Run
    settings: EvenPipeConfig
    unread: list[str]


def described_by(flags: Sequence[str], name: str, causal: bool, gpus: int, vocabulary: int | None = None) -> Described:
    """``vocabulary``: where no flag says it. Raises FlagError, one line, DescriptionError for a model that is none."""
    settings, left = settings_of(flags)
    args, unread = parse_flags(left)
    if vocabulary is not None and not hasattr(args, "vocab_size"):
        args.padded_vocab_size = vocabulary
    of = model_of(args, name, causal)
    layout = _completed(args, of, gpus)
    pipelined = Pipelined()
    if settings.active:
        group = 1 if settings.group_size == "auto" else settings.group_size
        pipelined = Pipelined(settings.schedule or "1f1b", settings.bpipe, group)
    run = run_of(args, pipelined, layout)
    return Described(of, run, settings, [word for word in unread if word.startswith("--")])


def settings_of(flags: Sequence[str]) -> tuple[EvenPipeConfig, list[str]]:
    """EvenPipe's own flags, and the other words. Raises FlagError for what cannot be, or not together."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS, exit_on_error=False)
    for setting, field in EvenPipeConfig.model_fields.items():
        if field.annotation is bool or field.annotation == bool | None:
            parser.add_argument(flag(setting), dest=setting, action="store_true")
            parser.add_argument(flag(setting).replace("--", "--no-", 1), dest=setting, action="store_false")
        else:
            parser.add_argument(flag(setting), dest=setting)
    try:
        found, left = parser.parse_known_args(list(flags))
        settings = EvenPipeConfig.of(**vars(found))
    except ArgumentError as error:
        raise FlagError(str(error).removeprefix("argument ")) from None
    except ConfigError as error:
        raise FlagError(f"{flag(error.setting)} {error}") from None
    wrong = contradiction_in(settings, FLAGS, CONTRADICTIONS)
    if wrong is not None:
        raise FlagError(wrong)
    return settings, left


def _completed(args: Namespace, model: Model, gpus: int) -> list[list[str]] | None:
    """Fills in what Megatron derives from flags, as `validate_args` does; the layout's parts, if there is one."""

    def given(name: str, default: int) -> int:
        return int(getattr(args, name, None) or default)

    tensor, stages, context = (
        given(f"{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context")
    )
    ways = tensor * stages * context
    if gpus % ways:
        raise FlagError(
            f"--pipeline-model-parallel-size {stages}: with tensor {tensor} × context {context} a replica is "
            f"{ways} GPUs, into which {gpus} do not divide: change one of them, or the nodes"
        )
    args.data_parallel_size = gpus // ways
    if getattr(args, "bf16", False):
        args.accumulate_allreduce_grads_in_fp32 = True
    if tensor == 1:
        args.sequence_parallel = False
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None:
        parts = kinds_of(layout, model.layers, stages)
        args.virtual_pipeline_model_parallel_size = len(parts) // stages
        return parts
    virtual = given("num_virtual_stages_per_pipeline_rank", 1)
    if each := given("num_layers_per_virtual_pipeline_stage", 0):
        virtual = model.layers // (stages * each)
    args.virtual_pipeline_model_parallel_size = virtual
    if not hasattr(args, "global_batch_size"):
        args.global_batch_size = args.data_parallel_size * given("micro_batch_size", 1)
    return None
