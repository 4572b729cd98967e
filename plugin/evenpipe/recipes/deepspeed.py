"""DeepSpeed's configuration with the flags of train.py for a run, and the run that they describe."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NoReturn

from evenpipe.descriptions import Model, described
from evenpipe.planner.run import Run
from evenpipe.recipes.recipe import Recipe, RecipeError
from evenpipe.recipes.rendering import render, verbatim
from evenpipe.settings.config import EvenPipeConfig

__all__ = ["CONFIGURATION", "batch_of", "boundaries_of", "described_by", "precision_of", "training_files"]

CONFIGURATION: Final = "ds_config.json"
#: What model.py has before the model's layers, and behind them: words and positions, norm and logits.
_ENDS: Final = 2


def training_files(recipe: Recipe) -> dict[str, str]:
    """Return the configuration, and the scripts that it is for."""
    scripts = {name: verbatim(name) for name in ("train.py", "model.py", "data.py")}
    given = {"run": recipe.run, "settings": recipe.settings, "boundaries": boundaries_of(recipe.model, recipe.run)}
    return {**scripts, CONFIGURATION: render(CONFIGURATION, **given)}


def boundaries_of(model: Model, run: Run) -> list[int]:
    """Return the layers of model.py at which stages begin, and their number."""
    each = list(run.layers_of(model))
    each[0] += _ENDS
    each[-1] += _ENDS
    return [0, *accumulate(each)]


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"train.sh: {message}: give what train.py takes")


def described_by(
    flags: Sequence[str], name: str, configuration: Mapping[str, Any], settings: EvenPipeConfig | None, gpus: int
) -> tuple[Model, Run]:
    """``settings``: those of the section, checked. Raises RecipeError, DescriptionError for a model that is none."""
    args = _parser().parse_args(list(flags))
    said = {field: value for field, value in vars(args).items() if field in Model.model_fields}
    said["dropout"] = bool(args.dropout)
    of = described(Model, name, said, "train.sh", {field: f"--{field.replace('_', '-')}" for field in said})
    if args.stages < 1 or gpus % args.stages:
        raise RecipeError(f"train.sh: --stages {args.stages}: {gpus} GPUs do not divide into them: change one of them")
    data = gpus // args.stages
    micro, accumulated = batch_of(configuration, data)
    return of, Run(
        global_batch=micro * accumulated * data,
        stages=args.stages,
        data=data,
        micro_batch=micro,
        recompute="full" if args.recompute else "none",
        schedule=settings.spec.name if settings else "1f1b",
        bpipe=bool(settings and settings.bpipe),
        group_size=settings.group_size if settings and settings.group_size != "auto" else 1,
        layout=_layout(settings.partition if settings else None, of.layers, args.stages),
        precision=precision_of(configuration),
        attention="unfused" if precision_of(configuration) == "fp32" else "flash",
        sharded_optimizer=_of(configuration, "zero_optimization").get("stage", 0) == 1,
        blocking=() if settings else None,
    )


def _parser() -> ArgumentParser:
    """Return the parser of train.py's flags; those of the model are stored under the names of its fields."""
    parser = _Parser("train.py", add_help=False, allow_abbrev=False)
    for size in ("layers", "hidden", "ffn", "heads", "sequence", "vocabulary", "stages", "iterations"):
        parser.add_argument(f"--{size}", type=int, required=True)
    for size in ("key-value-heads", "head-dim", "seed", "save-interval"):
        parser.add_argument(f"--{size}", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rms-norm", dest="norm", action="store_const", const="rms", default="layer")
    parser.add_argument("--rotary", dest="positions", action="store_const", const="rotary", default="learned")
    for switch, field in (("masked", "causal"), ("no-biases", "biases"), ("untied", "tied")):
        parser.add_argument(f"--{switch}", dest=field, action="store_false")
    for switch in ("gated", "recompute", "mock"):
        parser.add_argument(f"--{switch}", action="store_true")
    for path in ("data", "checkpoints", "deepspeed_config"):
        parser.add_argument(f"--{path}")
    return parser


def batch_of(configuration: Mapping[str, Any], data: int, name: str = CONFIGURATION) -> tuple[int, int]:
    """Return the micro-batch size and the micro-batches of a replica; DeepSpeed needs any two of three sizes.

    name: of the file. Raises RecipeError where they are none, or do not go together.
    """
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (configuration.get(key) for key in keys)
    for key, value in zip(keys, (whole, micro, steps), strict=True):
        if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            raise RecipeError(f"{name}: {key}: {value!r} is no whole number above 0: give one")
    if whole and micro and not steps:
        steps = whole // (micro * data)
    if whole and steps and not micro:
        micro = whole // (steps * data)
    micro, steps = micro or 1, steps or 1
    if whole and whole != micro * steps * data:
        raise RecipeError(
            f"{name}: train_batch_size {whole}: is not {micro} × {steps} × {data} (micro-batch size × "
            f"accumulation steps × replicas): {micro * steps * data} is"
        )
    return micro, steps


def _layout(partition: Any, layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of the model for each stage, of the boundaries that the section has."""
    if not isinstance(partition, tuple):
        return None
    whole = layers + 2 * _ENDS
    said = f"{CONFIGURATION}: evenpipe.partition {list(partition)}"
    if len(partition) != stages + 1:
        raise RecipeError(f"{said}: {len(partition) - 1} stages for --stages {stages}: give {stages + 1} boundaries")
    if partition[0] != 0 or partition[-1] != whole or list(partition) != sorted(partition):
        raise RecipeError(f"{said}: --layers {layers} are {whole} with those at both ends: go from 0 to {whole}")
    each = [end - start for start, end in pairwise(partition)]
    each[0] -= _ENDS
    each[-1] -= _ENDS
    if min(each) < 0:
        raise RecipeError(
            f"{said}: words and positions, and norm and logits, have to be on one stage each: move a boundary"
        )
    return tuple(each) if len(set(each)) > 1 else None


def precision_of(configuration: Mapping[str, Any]) -> Any:
    """Return bf16, fp16 or fp32."""
    return next((name for name in ("bf16", "fp16") if _of(configuration, name).get("enabled")), "fp32")


def _of(configuration: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = configuration.get(key)
    return found if isinstance(found, Mapping) else {}
