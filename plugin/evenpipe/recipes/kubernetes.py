"""A PyTorchJob, and the ConfigMap with what its pods run."""

from __future__ import annotations

from collections.abc import Mapping

from evenpipe.recipes.recipe import Recipe
from evenpipe.recipes.rendering import render
from evenpipe.recipes.scripts import title_of

__all__ = ["job_of"]


def job_of(recipe: Recipe, files: Mapping[str, str]) -> str:
    """One document of YAML after the other: a master, and a worker for each further node."""
    given, nodes = recipe.settings, recipe.cluster.nodes
    return render(
        "job.yaml",
        title=title_of(recipe),
        name=recipe.name,
        configuration=f"{recipe.name[:56].rstrip('-')}-recipe",
        namespace=given.namespace,
        files=files,
        roles=[("Master", 1)] + [("Worker", nodes - 1)] * (nodes > 1),
        gpus_per_node=recipe.cluster.gpus_per_node,
        image=given.image,
        master_port=given.master_port,
        mount=given.mount,
        claim=given.claim or recipe.name,
    )
