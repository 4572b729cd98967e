"""All files of a recipe, written together or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from evenpipe.recipes.deepspeed import training_files
from evenpipe.recipes.megatron import train_script
from evenpipe.recipes.readme import readme_of
from evenpipe.recipes.recipe import Recipe, RecipeError
from evenpipe.recipes.rendering import render

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
    return files | {"README.md": readme_of(recipe), "recipe.json": json.dumps(recipe.to_json(), indent=2) + "\n"}


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
