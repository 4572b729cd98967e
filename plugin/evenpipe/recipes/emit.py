"""All files of a recipe."""

from __future__ import annotations

import json

from evenpipe.recipes.deepspeed import training_files
from evenpipe.recipes.kubernetes import job_of
from evenpipe.recipes.readme import readme_of
from evenpipe.recipes.recipe import Recipe
from evenpipe.recipes.scripts import launch_files, train_script

__all__ = ["files_of"]


def files_of(recipe: Recipe) -> dict[str, str]:
    """Texts by name. Raises EstimateError for a run that cannot be, RecipeError for values that no file can carry."""
    run = {"train.sh": train_script(recipe)}
    if recipe.framework == "deepspeed":
        run |= training_files(recipe)
    started = {"job.yaml": job_of(recipe, run)} if recipe.launcher == "kubernetes" else run | launch_files(recipe)
    return started | {"README.md": readme_of(recipe), "recipe.json": json.dumps(recipe.to_json(), indent=2) + "\n"}
