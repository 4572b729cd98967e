"""Flags of Megatron-LM's scripts for a run, the run that such flags describe, and whether Megatron starts it."""

from __future__ import annotations

import re
import shlex
from argparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final, NamedTuple

from evenpipe.descriptions import Model
from evenpipe.planner.arguments import FlagError, Pipelined, Values, model_of, parse_flags, run_of
from evenpipe.planner.features import flags_of
from evenpipe.planner.run import Run
from evenpipe.recipes.flag_needs import Given, without_effect
from evenpipe.recipes.recipe import Recipe, series
from evenpipe.recipes.rendering import macros, render
from evenpipe.schedule import AUTO
from evenpipe.settings.config import ConfigError, EvenPipeConfig
from evenpipe.settings.contradictions import CONTRADICTIONS, contradiction_in
from evenpipe.settings.spelling import FLAGS, flag

__all__ = [
    *("Described", "described_by", "kinds_of", "layout_of", "run_flags", "settings_of", "starts", "train_script"),
    "unrolled",
]


def train_script(recipe: Recipe) -> str:
    """Return train.sh; its template has the flags of the model, of training and of files."""
    arrays = _arrays(recipe.model, recipe.run)
    frequency, release = _frequency(recipe.model), series(recipe.settings.release)
    return render("train.sh", recipe=recipe, run_flags=arrays, frequency=frequency, release=release)


def run_flags(model: Model, run: Run) -> list[tuple[str, ...]]:
    """Return the flags of how the model is divided, scheduled and kept, without dashes, each with its values.

    EvenPipe's are among them where it carries out the schedule, so that no hand-over is waited for.
    """
    parallel, schedule, memory = _arrays(model, run)
    flags: list[tuple[str, ...]] = []
    for word in shlex.split("\n".join((parallel, schedule if run.blocking == () else "", memory))):
        if word.startswith("--"):
            flags.append((word.removeprefix("--"),))
        else:
            flags[-1] = (*flags[-1], word)
    return flags


def _arrays(model: Model, run: Run) -> tuple[str, str, str]:
    """Return the lines of flags of how the model is divided, of the schedule, and of what is kept."""
    lines = macros("run_flags")
    features = flags_of(_taken(run))
    return lines.parallel(model, run, layout_of(model, run)), lines.schedule(run), lines.memory(run, features)


#: Parts in a row from which on a layout has them once, with their number.
_MANY: Final = 8


def layout_of(model: Model, run: Run) -> str | None:
    """`--pipeline-model-parallel-layout`, part by part; None where Megatron's own is the same."""
    if run.layout is None:
        return None
    parts = [f"t*{layers}" if layers > 1 else "t" * layers for layers in run.layout]
    further = run.further_part if run.further_part is not None else len(parts) - 1
    if model.mtp_layers:
        parts[further] += "m" * model.mtp_layers
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}L" if len(parts) > 1 else f"E{parts[0]}L"
    runs = [(part, len(list(same))) for part, same in groupby(f"{part}|" for part in parts)]
    text = "".join(f"({part})*{times}" if times >= _MANY else part * times for part, times in runs)
    return text.removesuffix("|")


def _frequency(model: Model) -> str | None:
    """Return `--moe-layer-freq`: which layers have experts, where it is not all of them."""
    each = [model.expert_layers(layer, layer + 1) for layer in range(model.layers)]
    if all(each):
        return None
    dense = each.index(1) if 1 in each else model.layers
    if all(each[dense:]):
        return f"([0]*{dense}+[1]*{model.layers - dense})"
    return str(each).replace(" ", "")


def _taken(run: Run) -> Run:
    """Return the run without what Megatron refuses at its sizes, where it would have nothing to do."""
    interleaved = run.stages == 1 or run.chunks > 1
    return replace(
        run,
        user_buffers=run.user_buffers and bool(run.sequence_parallel),
        overlap_experts=run.overlap_experts and run.expert > 1 and interleaved and run.recompute != "full",
    )


#: What is written once with its number, groups first, as `PipelineParallelLayerLayout.parse_str_to_list` reads it.
_REPEATED: Final = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")


def unrolled(layout: str) -> list[str]:
    """Return the symbols of each part, repetitions written out, whatever they are: "Et*2|(t|)*2L" is Ett, t, t, L."""
    text = layout.replace(",", "")
    for repeated in _REPEATED:
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


_KINDS: Final = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_FLAG: Final = "--pipeline-model-parallel-layout"


def kinds_of(layout: str, layers: int, stages: int) -> list[list[str]]:
    """Return the kinds of layers of each part. Raises FlagError where it is none for so many layers and stages."""
    parts = unrolled(layout)
    text = "".join(parts)
    strange = sorted(set(text) - set(_KINDS))
    if strange:
        raise FlagError(f"{_FLAG} {layout}: {strange[0]!r} is no layer: use E, t, m, L and |")
    if text.count("t") != layers:
        raise FlagError(f"{_FLAG} {layout}: has {text.count('t')} layers, --num-layers {layers}: change one of them")
    if len(parts) % stages:
        raise FlagError(
            f"{_FLAG} {layout}: has {len(parts)} parts, no multiple of --pipeline-model-parallel-size {stages}: change "
            "one of them"
        )
    if not (parts[0].startswith("E") and parts[-1].endswith("L") and text.count("E") == text.count("L") == 1):
        raise FlagError(f"{_FLAG} {layout}: begin the first part with E, and end the last with L")
    return [[_KINDS[letter] for letter in part] for part in parts]


class Described(NamedTuple):
    """``unread``: flags that only Megatron's own parser can judge. ``run``: of the given number of GPUs.

    ``ignored``: a line for each flag without effect.
    """

    model: Model
    run: Run
    settings: EvenPipeConfig
    unread: list[str]
    ignored: Sequence[str] = ()


def described_by(
    flags: Sequence[str], name: str, causal: bool, gpus: int, vocabulary: int | None = None, expandable: bool = False
) -> Described:
    """``vocabulary``: where no flag says it. ``expandable``: as `run_of` has it.

    Raises FlagError, one line, DescriptionError for a model that is none, EstimateError for an option that Megatron
    refuses with the others.
    """
    settings, left = settings_of(flags)
    args, unread = parse_flags(left)
    if vocabulary is not None and not hasattr(args, "vocab_size"):
        args.padded_vocab_size = vocabulary
    of = model_of(args, name, causal)
    layout = _completed(args, of, gpus)
    pipelined = Pipelined()
    if settings.active:
        group = 1 if settings.group_size == "auto" else settings.group_size
        named = "1f1b" if settings.schedule in (None, AUTO) else settings.schedule
        pipelined = Pipelined(named, settings.bpipe, group)
    run = run_of(args, pipelined, layout, expandable)
    names = {word.removeprefix("--").partition("=")[0] for word in left if word.startswith("--")}
    ignored = [*without_effect(Given(names, Values(args), of, run))]
    if settings.schedule == AUTO:
        ignored.append(f"{FLAGS.mention('schedule', AUTO)}: chosen in a run by its own times; estimated as 1f1b")
    if settings.swap is not None:
        ignored.append(f"{FLAGS.mention('swap', settings.swap)}: what it changes is not in this estimate")
    return Described(of, run, settings, [word for word in unread if word.startswith("--")], ignored)


def settings_of(flags: Sequence[str]) -> tuple[EvenPipeConfig, list[str]]:
    """EvenPipe's own flags, and the other words. Raises FlagError for what cannot be, or not together."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS, exit_on_error=False)
    for setting, field in EvenPipeConfig.model_fields.items():
        assert isinstance(field.json_schema_extra, dict)
        short = str(field.json_schema_extra.get("short", flag(setting)))
        for name in dict.fromkeys((flag(setting), f"--evenpipe-{setting.replace('_', '-')}", short)):
            if field.annotation is bool or field.annotation == bool | None:
                parser.add_argument(name, dest=setting, action="store_true")
                parser.add_argument(name.replace("--", "--no-", 1), dest=setting, action="store_false")
            else:
                parser.add_argument(name, dest=setting)
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
    if getattr(args, "bf16", False) and not getattr(args, "grad_reduce_in_bf16", False):
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


def starts(run: Run) -> bool:
    """Return whether Megatron starts the run (`validate_args` and `TransformerConfig.__post_init__`, 0.16)."""
    return all(
        (
            run.stages > 1 or run.chunks == 1,
            run.tensor > 1 or not run.user_buffers,
            run.sharded_optimizer or (run.moment_bytes >= 4 and not run.overlap_parameters),
            run.overlap_gradients or not run.overlap_parameters,
            # An optimizer on the host has moments in fp32, and asks for the precision-aware one, which is sharded.
            not run.optimizer_offload or (bool(run.sharded_optimizer) and run.moment_bytes >= 4),
            # EvenPipe's schedules do not start the offloading anew after each batch.
            not run.offload_modules or (run.blocking != () and run.recompute != "full"),
            not {"expert_fc1", "moe_act"} & set(run.offload_modules) or "moe" not in run.again,
            run.context == 1 or run.attention == "flash",
            # In a V the last part has both the loss and what is predicted further ahead.
            "vee" not in run.spec.needed(run.chunks) or run.further_part in (None, run.stages * run.chunks - 1),
            run.expert == 1 or run.tensor == 1 or run.sequence_parallel,
            # Tokens can travel beside another micro-batch's compute.
            not run.overlap_experts
            or (run.expert > 1 and run.recompute != "full" and (run.stages == 1 or run.chunks > 1)),
            # Graphs of whole layers cannot have a part of them carried out again.
            not run.graphs or run.recompute != "full",
        )
    )
