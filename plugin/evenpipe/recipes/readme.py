"""The README of a recipe."""

from __future__ import annotations

from evenpipe.recipes.predictions import changes_of, stages_of
from evenpipe.recipes.recipe import Recipe
from evenpipe.recipes.rendering import render
from evenpipe.recipes.scripts import title_of

__all__ = ["readme_of"]


def readme_of(recipe: Recipe) -> str:
    estimate = recipe.estimate
    return render(
        "README.md",
        name=recipe.name,
        title=title_of(recipe),
        sizes=_sizes(recipe),
        steps=_steps(recipe),
        trial=_trial(recipe),
        run=recipe.run,
        estimate=estimate,
        tokens_per_second=estimate.samples_per_second * recipe.model.sequence,
        most=max(stage.bytes.total for stage in estimate.stages) / 2**30,
        memory_gib=recipe.cluster.device.memory_gib,
        stages=stages_of(recipe),
        placement=_placement(recipe),
        warnings=[*estimate.warnings, *_of_training(recipe)],
        changes=changes_of(recipe),
    )


def _sizes(recipe: Recipe) -> str:
    run, model = recipe.run, recipe.model
    division = [f"tensor {run.tensor}", f"pipeline {run.stages}", f"data {run.data}"]
    division += [f"context {run.context}"] * (run.context > 1) + [f"expert {run.expert}"] * (run.expert > 1)
    schedule = f"{run.spec.name}{f' with {run.chunks} chunks a stage' if run.chunks > 1 else ''}"
    schedule += f" in groups of {run.group_size}" if run.group_size > 1 else ""
    return (
        f"{model.layers} layers of {model.hidden:,}, {model.sequence:,} tokens a sample; {recipe.cluster.gpus} GPUs as "
        f"{' × '.join(division)}; {run.micro_batches} micro-batches of {run.micro_batch}; schedule {schedule}"
        f"{' with BPipe' if run.bpipe else ''}; {run.precision}, recomputing {run.recompute}."
    )


def _steps(recipe: Recipe) -> list[str]:
    edited = (
        "Edit the first lines of `train.sh`: paths"
        + ("" if recipe.mock else " of data, tokenizer and checkpoints")
        + "."
    )
    install = "On every node: `pip install` EvenPipe where the framework and torch are installed."
    nodes = recipe.cluster.nodes
    if recipe.launcher == "kubernetes":
        return [
            "Build an image with EvenPipe in it, and name it in `job.yaml`; edit the first lines of `train.sh` there.",
            "`kubectl apply -f job.yaml`; pods log what the ranks print. `kubectl delete -f job.yaml` ends it.",
        ]
    if recipe.launcher == "slurm":
        return [install, edited, "In this folder: `sbatch launch.sbatch`."]
    if recipe.launcher == "deepspeed":
        hosts = "Name the nodes in `hostfile`, and the first of them in `launch.sh`; " if nodes > 1 else ""
        return [install, edited, f"{hosts}{'then' if hosts else 'Then'} `bash launch.sh`."]
    if nodes == 1:
        return [install, edited, "`bash train.sh`"]
    return [install, edited, f"On node N, from 0 to {nodes - 1}: `MASTER_ADDR=<node 0> NODE_RANK=<N> bash train.sh`"]


def _trial(recipe: Recipe) -> str:
    if recipe.framework == "megatron":
        return "With `EVENPIPE_CPU=1` in the environment it trains on CPU, where a small model can be tried."
    return "With `DS_ACCELERATOR=cpu` in the environment it trains on CPU, where a small model can be tried."


def _of_training(recipe: Recipe) -> list[str]:
    """What is trained otherwise than without EvenPipe."""
    if "stream" not in recipe.run.spec.needs:
        return []
    return ["training: each step takes the gradient of the batch before: choose a learning rate that suits that delay"]


def _placement(recipe: Recipe) -> str:
    run = recipe.run
    if run.bpipe and run.stages > 3:
        return (
            "Ranks are the framework's; EvenPipe puts both stages of a pair next to each other on a node, where "
            "there is room for both, so that evictions do not leave it."
        )
    if run.placement == "pipeline":
        return "A pipeline's stages are next to each other (`--use-tp-pp-dp-mapping`), its replicas further apart."
    return "A stage's replicas are next to each other, since they exchange more than stages do."
