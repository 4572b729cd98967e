"""Combinations that do not exist, with what to use instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from evenpipe.descriptions import Model
from evenpipe.planner.possible import check
from evenpipe.planner.run import Run
from evenpipe.planner.search.question import Engine
from evenpipe.recipes.recipe import FRAMEWORKS, LAUNCHERS, Framework, Launcher, Recipe, RecipeError, Settings, series
from evenpipe.schedule import ScheduleError

__all__ = ["NO_ADAPTERS", "refuse", "refuse_before_planning", "refuse_divided"]

#: The last series of Megatron-LM that has pretrain_bert.py.
_LAST_BERT = (0, 17)
#: The first and the last series that EvenPipe works with.
_SERIES = (0, 14), (0, 19)
#: Settings that only some launchers' files have.
_SETTINGS_OF: Final[Mapping[str, tuple[Launcher, ...]]] = MappingProxyType(
    dict.fromkeys(("partition", "account", "time"), ("slurm",))
    | dict.fromkeys(("image", "namespace", "claim", "mount"), ("kubernetes",))
    | {"hosts": ("deepspeed",)}
)
#: `sbatch --time`: minutes, minutes:seconds, hours:minutes:seconds, and with days-hours before them.
_SLURM_TIME: Final = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.ASCII | re.I)
#: `[host[:port]/]path[:tag][@digest]`, as registries have it.
_IMAGE: Final = re.compile(
    r"([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(@[a-z0-9]+:[0-9a-f]{32,})?",
    re.ASCII,
)
_EXAMPLE_IMAGE: Final = "nvcr.io/nvidia/pytorch:25.09-py3"
NO_ADAPTERS: Final = "--lora-rank: pretrain_gpt.py has no adapters: leave it out, or train with Megatron Bridge"
#: A label of RFC 1123, as Kubernetes takes names.
_LABEL: Final = re.compile(r"(?=.{1,63}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?", re.ASCII)


def refuse_before_planning(kind: str, model: Model, framework: Framework, settings: Settings) -> None:
    """Raise RecipeError for what no plan makes possible."""
    for line in _always(kind, model, framework, settings):
        raise RecipeError(line)


def refuse(recipe: Recipe, engine: Engine) -> None:
    """Raise RecipeError for the first reason why the recipe cannot be started. Raises EstimateError too."""
    check(recipe.run, recipe.model, recipe.cluster)
    if recipe.run.lora_rank:
        raise RecipeError(NO_ADAPTERS)
    for line in (*_of_run(recipe.model, recipe.run, recipe.framework, engine), *_of_launcher(recipe)):
        raise RecipeError(line)


def refuse_divided(framework: Framework, tensor: int, context: int) -> None:
    """Raise RecipeError where layers would be divided that are whole."""
    if framework == "deepspeed" and tensor * context > 1:
        raise RecipeError(
            f"--framework deepspeed: its layers are whole, not divided by tensor × context = {tensor * context}: "
            "plan with --tensor-parallel 1 --context-parallel 1, or use --framework megatron"
        )


def _always(kind: str, model: Model, framework: Framework, settings: Settings) -> Iterator[str]:
    is_kind = "gpt" if model.causal else "bert"
    if is_kind != kind:
        yield f"--model {model.name}: is a {is_kind.upper()}: evenpipe recipe {is_kind}"
    if 0 < model.chunk < model.sequence:
        yield (
            f"--seq-length {model.sequence}: {model.name}'s attention stays within {model.chunk} tokens, for which "
            f"{FRAMEWORKS[framework]} has no option: give {model.chunk} or less"
        )
    if framework == "megatron":
        yield from _of_release(kind, settings)
        if kind == "bert" and settings.data == "mock":
            yield "--set data=mock: pretrain_bert.py has no mock data: give data=PREFIX, or --framework deepspeed"
        return
    for what, has in (("experts", model.experts), ("latent attention", model.latent), ("mtp_layers", model.mtp_layers)):
        if has:
            yield f"--model {model.name}: the recipe's layers for DeepSpeed have no {what}: use --framework megatron"


def _of_release(kind: str, settings: Settings) -> Iterator[str]:
    release, (first, last) = series(settings.release), _SERIES
    if not first <= release <= last:
        yield f"--set release={settings.release}: EvenPipe works with 0.{first[1]} to 0.{last[1]}: use one of these"
    if kind == "bert" and release > _LAST_BERT:
        yield (
            f"--set release={settings.release}: Megatron-LM has no pretrain_bert.py from 0.18 on: "
            "use --set release=0.16, or --framework deepspeed"
        )


def _of_run(model: Model, run: Run, framework: Framework, engine: Engine) -> Iterator[str]:
    name = FRAMEWORKS[framework]
    try:
        spec = run.spec
    except ScheduleError as error:
        raise RecipeError(str(error).partition("\n")[0]) from None
    if lacking := engine.lacks(spec):
        chunked = " or one chunk a stage" if run.chunks > 1 else ""
        yield f"schedule {spec.name}: {name} does not run it ({lacking}): plan with another --schedule{chunked}"
    for what, asked, offered in (
        ("recompute", run.recompute, engine.scopes),
        ("placement", run.placement, engine.placements),
    ):
        if asked not in offered:
            yield f"{what} {asked}: {name} has {' or '.join(offered)}: plan for --framework {framework}"
    refuse_divided(framework, run.tensor, run.context)
    if framework == "deepspeed" and run.stages < 2:
        yield "stages 1: one stage is no pipeline, and DeepSpeed alone trains it: plan with --stages 2 or more"
    if framework == "deepspeed" and run.recomputed_layers is not None:
        yield "recompute: DeepSpeed computes all layers of a stage again, or none: use --framework megatron"
    if "stream" in spec.needs and run.micro_batches < run.stages:
        yield (
            f"schedule {run.schedule}: {run.micro_batches} micro-batches do not fill {run.stages} stages: plan with a "
            "larger --global-batch-size, or fewer stages"
        )


def _of_launcher(recipe: Recipe) -> Iterator[str]:
    given, nodes = recipe.settings, recipe.cluster.nodes
    if recipe.cluster.groups and recipe.launcher in ("slurm", "kubernetes"):
        other = "torchrun" if recipe.framework == "megatron" else "deepspeed"
        yield (
            f"--launcher {recipe.launcher}: orders nodes itself, and {recipe.cluster.name} has unlike ones: use "
            f"--launcher {other}, and start its nodes in the order of the list"
        )
    if given.hosts and len(recipe.hosts) != nodes:
        yield f"--set hosts={given.hosts}: names {len(recipe.hosts)} of {nodes} nodes: name each, separated by commas"
    for key, launchers in _SETTINGS_OF.items():
        if key in given.model_fields_set and recipe.launcher not in launchers:
            whose = " and ".join(LAUNCHERS[launcher] for launcher in launchers)
            yield f"--set {key}: is of {whose}, and {LAUNCHERS[recipe.launcher]} would not read it: leave it out"
    if given.time is not None and not _SLURM_TIME.fullmatch(given.time):
        yield f"--set time={given.time!r}: is no time limit of Slurm: give one such as 90, 24:00:00, 2-12 or UNLIMITED"
    if recipe.launcher != "kubernetes":
        return
    if not _IMAGE.fullmatch(given.image):
        yield f"--set image={given.image!r}: is no name of an image: give one such as {_EXAMPLE_IMAGE}"
    for key, name in (("name", recipe.name), ("namespace", given.namespace), ("claim", given.claim)):
        if name is not None and not _LABEL.fullmatch(name):
            yield (
                f"--set {key}={name!r}: {LAUNCHERS['kubernetes']} takes at most 63 lower-case letters, digits and "
                "dashes, a letter or digit at both ends: choose such a name"
            )
    if not given.mount.startswith("/") or ":" in given.mount or given.mount.rstrip("/") in ("", "/recipe", "/dev/shm"):
        yield f"--set mount={given.mount!r}: name a folder from the root on, without a colon, such as /data"
