"""All files of a recipe, written together or not at all; its README says what it is predicted to need and to reach."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from evenpipe.planner.run import EstimateError, Recompute, Run
from evenpipe.recipes.deepspeed import training_files
from evenpipe.recipes.megatron import train_script
from evenpipe.recipes.recipe import Recipe, RecipeError
from evenpipe.recipes.rendering import render
from evenpipe.schedule import ScheduleError, choose

__all__ = ["files_of", "write_files"]


def files_of(recipe: Recipe) -> dict[str, str]:
    """Texts by name. Raises EstimateError for a run that cannot be, RecipeError for values that no file can carry."""
    if recipe.framework == "megatron":
        files = {"train.sh": train_script(recipe)}
    else:
        files = {"train.sh": render("train.sh", recipe=recipe), **training_files(recipe)}
    if recipe.launcher == "kubernetes":
        # A master, and a worker for each further node; the ConfigMap has what their pods run.
        files = {"job.yaml": render("job.yaml", recipe=recipe, files=files)}
    elif recipe.launcher == "slurm":
        files["launch.sbatch"] = render("launch.sbatch", recipe=recipe)
    elif recipe.launcher == "deepspeed":
        files["launch.sh"] = render("launch.sh", recipe=recipe)
        if recipe.cluster.nodes > 1:
            files["hostfile"] = "".join(f"{host} slots={recipe.cluster.gpus_per_node}\n" for host in recipe.hosts)
    return files | {"README.md": _readme(recipe), "recipe.json": json.dumps(recipe.to_json(), indent=2) + "\n"}


def write_files(folder: Path, files: Mapping[str, str], force: bool = False) -> None:
    """Put texts at their names in a folder, which is made. Scripts can be run.

    All are written beside it first; then each takes its name at once, so that a reader sees an old file or a new one,
    never a part. Raises RecipeError, and leaves everything as it was, where one is there already and ``force`` is not
    given, and OSError where they cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"--out {folder}: is a file: name a folder")
    there = [name for name in files if os.path.lexists(folder / name)]
    if there and not force:
        raise RecipeError(f"--out {folder}: has {', '.join(there)}: name another folder, or write over it with --force")
    if others := [name for name in there if not (folder / name).is_file()]:
        raise RecipeError(f"--out {folder}: {', '.join(others)} is no regular file: name another folder")
    made = not folder.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".evenpipe-recipe-", dir=folder.parent))
    try:
        for name, text in files.items():
            path = beside / name
            with path.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            path.chmod(0o755 if text.startswith("#!") else 0o644)
        if made:
            beside.chmod(0o755)
            beside.rename(folder)
            return
        for name in files:
            (beside / name).replace(folder / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


_GIB: Final = 2**30


def _layers(recipe: Recipe) -> list[str]:
    """Layers of each stage, those of its chunks apart: the first chunks of all stages come first."""
    run = recipe.estimate.run
    parts = run.layers_of(recipe.model)
    return [" + ".join(map(str, parts[stage :: run.stages])) for stage in range(run.stages)]


def _ranks(recipe: Recipe, stage: int) -> str:
    """Return the ranks of the stage's first replica by Megatron's and DeepSpeed's order, and their node."""
    run, gpus_per_node = recipe.estimate.run, recipe.cluster.gpus_per_node
    inner = run.tensor * run.context
    first = stage * inner * (1 if run.placement == "pipeline" else run.data)
    last = first + inner - 1
    node, other = first // gpus_per_node, last // gpus_per_node
    said = f"{first}" if inner == 1 else f"{first} to {last}"
    return f"{said}, node {node}" if node == other else f"{said}, nodes {node} to {other}"


def _changes(recipe: Recipe) -> list[dict[str, Any]]:
    """Return what could be done otherwise, and can be: ``times`` is its time over that of the recipe, for a sample."""
    usual = recipe.estimate.iteration_ms / recipe.run.global_batch
    found = []
    for what, run in _otherwise(recipe):
        try:
            shown = recipe.estimator(run)
        except (EstimateError, ScheduleError):
            continue
        most = max(stage.bytes.total for stage in shown.stages) / _GIB
        times = shown.iteration_ms / run.global_batch / usual
        found.append({"what": what, "shown": shown, "times": times, "most_gib": most})
    return found


def _otherwise(recipe: Recipe) -> Iterator[tuple[str, Run]]:
    run = recipe.run
    scopes = [scope for scope in get_args(Recompute) if recipe.framework == "megatron" or scope != "selective"]
    if run.stages >= 4 and run.spec.balanced is not None:
        yield "without BPipe" if run.bpipe else "with BPipe", replace(run, bpipe=not run.bpipe)
    for scope in scopes:
        if scope != run.recompute:
            yield f"recomputing {_SCOPES[scope]}", replace(run, recompute=scope, recomputed_layers=None)
    for size in (run.micro_batch // 2, run.micro_batch * 2):
        if size:
            yield f"micro-batches of {size}", replace(run, micro_batch=size)
    if run.stages > 1:
        yield from _schedules(run)
    for times, said in ((0.5, "half"), (2, "twice")):
        batch = int(run.global_batch * times)
        if batch:
            yield f"{said} the samples of an iteration ({batch:,})", replace(run, global_batch=batch)


_SCOPES: Final = {"none": "nothing", "selective": "attention's core only", "full": "whole layers"}


def _schedules(run: Run) -> Iterator[tuple[str, Run]]:
    for name, size in (("1f1b", 1), ("kfkb", 2), ("2bw", 1)):
        if name == run.schedule or run.chunks > 1 or (name == "2bw" and run.micro_batches < run.stages):
            continue
        bpipe = run.bpipe and choose(name).balanced is not None
        late = " (gradients a batch late: other training)" if name == "2bw" else ""
        other = replace(run, schedule=name, group_size=size, bpipe=bpipe)
        yield f"schedule {name}{f', groups of {size}' if size > 1 else ''}{late}", other


def _readme(recipe: Recipe) -> str:
    return render(
        "README.md",
        recipe=recipe,
        gib=recipe.estimate.fullest_gib(recipe.cluster.device),
        layers=_layers(recipe),
        ranks=[_ranks(recipe, stage) for stage in range(recipe.estimate.run.stages)],
        changes=_changes(recipe),
    )
