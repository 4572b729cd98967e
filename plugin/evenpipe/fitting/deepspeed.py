"""Fit for DeepSpeed: a configuration, and what it does not say of the run, answered by keys to change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_args

from evenpipe.deepspeed.section import NAME, OFFERS, Section, SectionError, section_of
from evenpipe.descriptions import Cluster, Model, framework
from evenpipe.fitting.answers import Asked, answers, by_evenpipe
from evenpipe.fitting.document import (
    NOTHING_TO_GAIN,
    SAME_BITS,
    TITLES,
    Answer,
    Fit,
    FitError,
    Found,
    gaining,
    settings_of_run,
)
from evenpipe.fitting.moves import Aspect, changed
from evenpipe.fitting.weighing import Weighing
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.search.question import Engine
from evenpipe.planner.search.search import Planned
from evenpipe.recipes.deepspeed import batch_of, precision_of
from evenpipe.recipes.recipe import RecipeError
from evenpipe.recipes.surroundings import expandable

__all__ = [
    "ENGINE",
    "NAMES",
    "Configured",
    "configuration_in",
    "configured",
    "fitted",
    "in_deepspeed",
    "no_configuration",
    "with_changes",
]

#: It recomputes whole layers, its topology has replicas before stages, and 2bw's must not divide layers.
ENGINE: Final = Engine("DeepSpeed", OFFERS, ("none", "full"), ("replicas",), context=False, delayed_sharded=False)
#: What an answer is, by its name.
NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"least": TITLES["least"], "stock": "fastest with DeepSpeed's schedule", "evenpipe": TITLES["evenpipe"]}
)
#: Each configuration has one of these keys.
_KEYS: Final = frozenset(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization")
)
#: What a configuration can change, or one argument of the script's `PipelineModule`: recomputation.
_OPEN: Final[frozenset[Aspect]] = frozenset(("micro-batch", "optimizer", "recompute", "schedule"))
_SCHEDULES: Final = ("1f1b", "kfkb", "zb-h1")
#: Keys of the section that say nothing of memory or time.
_BESIDE: Final = ("pair_adjacent", "partition", "trace", "trace_iteration")
_AGAIN: Final = "PipelineModule(activation_checkpoint_interval={})"
_GIB: Final = 2**30


@dataclass(frozen=True)
class Configured:
    """A run that was read. name: of the file; ``values``: what is in it. notes: what was assumed."""

    name: str
    values: Mapping[str, Any]
    section: Section | None
    model: Model
    cluster: Cluster
    run: Run
    notes: tuple[str, ...]


def configuration_in(path: Path) -> dict[str, Any] | None:
    """Return the configuration of DeepSpeed's in a JSON file; None where the file is none. Raises FitError."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FitError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'no text'}") from None
    except json.JSONDecodeError as error:
        raise FitError(f"{path}: is no JSON: {error}") from None
    except RecursionError:
        raise FitError(f"{path}: is nested too deeply") from None
    if not isinstance(found, dict):
        raise FitError(f"{path}: is no object: name a configuration of DeepSpeed's, or one that Megatron-Bridge saved")
    return found if _KEYS & found.keys() else None


def no_configuration(path: Path) -> FitError:
    """Return what to say of a file that is to be DeepSpeed's configuration, and is none."""
    return FitError(f"{path}: is no configuration of DeepSpeed's: add one of {', '.join(sorted(_KEYS))}")


def configured(
    values: Mapping[str, Any],
    name: str,
    model: Model,
    cluster: Cluster,
    stages: int,
    tensor: int = 1,
    again: bool = False,
) -> Configured:
    """Read a configuration. stages, tensor: of the script's `PipelineModule`; again: it recomputes layers.

    Raises FitError.
    """
    from evenpipe.deepspeed.unsupported import refuse_configuration  # which imports torch

    try:
        refuse_configuration(values)
        section = section_of(values)
    except SectionError as error:
        said = str(error)
        raise FitError(f"{name}: {said.removeprefix(f'{NAME}: ') if 'zero_opt' in said else said}") from None
    if cluster.gpus % (stages * tensor):
        raise FitError(
            f"--stages {stages}: with --tensor-parallel {tensor} a replica is {stages * tensor} GPUs, into which "
            f"{cluster.gpus} do not divide: change one of them, or --cluster"
        )
    data = cluster.gpus // (stages * tensor)
    try:
        micro, steps = batch_of(values, data, name)
    except RecipeError as error:
        raise FitError(str(error)) from None
    measured = section is not None and "times" in section.spec.needs
    group = section.group_size if section is not None and section.group_size != "auto" else 1
    run = Run(
        global_batch=micro * steps * data,
        tensor=tensor,
        stages=stages,
        data=data,
        micro_batch=micro,
        recompute="full" if again else "none",
        schedule="1f1b" if section is None or measured else section.spec.name,
        bpipe=section is not None and section.bpipe,
        group_size=group,
        precision=precision_of(values),
        attention="unfused" if precision_of(values) == "fp32" else "flash",
        sharded_optimizer=(values.get("zero_optimization") or {}).get("stage", 0) == 1,
        blocking=None if section is None else (),
        expandable_segments=expandable(),
    )
    return Configured(name, values, section, model, cluster, run, tuple(_assumed(values, section)))


def _assumed(values: Mapping[str, Any], section: Section | None) -> Iterator[str]:
    """Yield a line for each thing that the estimates do not have, or have otherwise."""
    if section is not None and "times" in section.spec.needs:
        yield f'{NAME}.schedule "{section.schedule}": chosen in a run by its own times; estimated as 1f1b'
    if section is not None and section.group_size == "auto":
        yield f'{NAME}.group_size "auto": chosen in a run; estimated as 1'
    for key in ("partition", "swap"):
        if section is not None and getattr(section, key) is not None:
            yield f"{NAME}.{key}: not in these estimates, which have even stages and swap nothing"
    kind = str((values.get("optimizer") or {}).get("type", "Adam"))
    if "adam" not in kind.lower():
        yield f"optimizer.type {kind}: estimated as Adam"
    for key in ("offload_optimizer", "offload_param"):
        if (values.get("zero_optimization") or {}).get(key):
            yield f"zero_optimization.{key}: not in these estimates, which keep it on the GPU"


def fitted(
    given: Configured, keep: frozenset[Aspect] = frozenset(), step: Callable[[str], None] = lambda _: None
) -> Found:
    """Return the answers to a configuration. ``step`` is called with what is looked for. Raises FitError."""
    of = framework("deepspeed")
    weighing = Weighing(given.model, given.cluster, of, _starts)
    run = weighing.balanced(given.run.of(of))
    fixed = (frozenset(get_args(Aspect)) - _OPEN) | keep
    asked = Asked(
        weighing, run, ENGINE, fixed, lambda new: len(_keys(given, run, new)), (), _SCHEDULES, True, step=step
    )
    try:
        found = answers(asked)
    except EstimateError as error:
        if weighing.planned(run) is None:
            raise FitError(f"{given.name}: {error}") from None
        raise FitError(
            f"{given.name}: no micro-batch size, ZeRO-1, recomputation or schedule fits {given.model.name} on --stages "
            f"{run.stages} of {given.cluster.name}: give more stages, or more memory"
        ) from None
    shown = [_answer(one, names, given, run) for _, one, names in gaining(found, NAMES, lambda new: new)]
    notes = [*given.notes, *([] if shown else [NOTHING_TO_GAIN])]
    return Found(found, Fit(now=found.now.estimate.to_json(), answers=shown, notes=notes))


def _starts(run: Run) -> bool:
    """Return whether DeepSpeed's pipelines have such a run: whole layers are recomputed, each on its own."""
    return run.recompute in ("none", "full") and run.recomputed_layers is None and run.chunks == 1


def _answer(one: Planned, names: list[str], given: Configured, run: Run) -> Answer:
    keys = _keys(given, run, one.run)
    added = [f'"{key}": {json.dumps(value)}' for key, value in keys.items() if value is not None]
    removed = [f'"{key}": {json.dumps(given.values[key])}' for key in keys if key in given.values]
    if one.run.recompute != run.recompute:
        added.append(f"in the script: {_AGAIN.format(int(one.run.recompute == 'full'))}")
    aspects = changed(run, one.run)
    return Answer(
        names=names,
        memory_gib=one.most_bytes / _GIB,
        iteration_ms=one.estimate.iteration_ms,
        tokens_per_second_per_gpu=one.estimate.tokens_per_second,
        uncertainty=one.estimate.uncertainty._asdict(),
        loss="same bits" if aspects <= SAME_BITS else "other dropout" if given.model.dropout else "rounding",
        warnings=[in_deepspeed(line) for line in one.estimate.warnings if line.startswith("memory pressure")],
        added=added,
        removed=removed,
        command=[],
        changes=keys,
        environment={},
        evenpipe=keys.get(NAME) or {},
    )


def _keys(given: Configured, old: Run, new: Run) -> dict[str, Any]:
    """Return the keys that another run changes, DeepSpeed's own first; None for one that goes."""
    found: dict[str, Any] = {}
    if new.micro_batch != old.micro_batch:
        sizes = {"train_micro_batch_size_per_gpu": new.micro_batch, "gradient_accumulation_steps": new.micro_batches}
        found |= {key: size for key, size in sizes.items() if given.values.get(key) != size}
    if new.sharded_optimizer != old.sharded_optimizer:
        zero = given.values.get("zero_optimization") or {}
        found["zero_optimization"] = {**zero, "stage": int(bool(new.sharded_optimizer))}
    ours = ("schedule", "bpipe", "group_size", "blocking")
    if any(getattr(new, name) != getattr(old, name) for name in ours):
        found[NAME] = _section(given, new) if by_evenpipe(new) else None
    return found


def _section(given: Configured, run: Run) -> dict[str, Any]:
    kept = {key: value for key, value in given.values.get(NAME, {}).items() if key in _BESIDE}
    return settings_of_run(run) | kept


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Return the text of a configuration with these keys."""
    found = {key: value for key, value in {**values, **changes}.items() if value is not None}
    return json.dumps(found, indent=2) + "\n"


#: Options of `evenpipe estimate`, as a script and a configuration have them.
_SPELT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--recompute full": _AGAIN.format(1),
        "--recompute selective": _AGAIN.format(1),  # DeepSpeed computes whole layers again
        "--attention flash": "bf16 and flash attention in the script",
        "--sharded-optimizer": '"zero_optimization": {"stage": 1}',
        "--micro-batch-size than": "train_micro_batch_size_per_gpu than",
        "--bpipe": f'"{NAME}": {{"bpipe": true}}',
        "--layout": f"{NAME}.partition",
    }
)


def in_deepspeed(line: str) -> str:
    """Return a line of the planner's with its options as DeepSpeed's users have them."""
    for option, spelt in _SPELT.items():
        line = line.replace(option, spelt)
    return line
