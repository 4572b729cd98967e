"""Writes the recipes of this folder, their pictures and the catalogue, from the configurations below.

    python -m recipes.regenerate

`tests/recipes/test_catalogue.py` holds what is here to what this writes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evenpipe.cli.plan import engine_of
from evenpipe.descriptions import cluster, framework, model
from evenpipe.planner.run import Run
from evenpipe.planner.search.question import Question
from evenpipe.planner.search.search import search
from evenpipe.recipes import Recipe, Settings
from evenpipe.recipes.files import files_of, write_files
from evenpipe.recipes.recipe import FRAMEWORKS, LAUNCHERS, Framework, Launcher
from evenpipe.recipes.unsupported import refuse
from recipes.drawing import draw

HERE = Path(__file__).resolve().parent
PICTURE = "picture.png"


@dataclass(frozen=True, eq=False)
class Entry:
    """A recipe of the catalogue. ``run``: the configuration itself, or what the planner is asked."""

    folder: str
    model: str
    cluster: str
    framework: Framework
    launcher: Launcher
    run: Run | Question
    source: str
    says: str


@cache
def recipe_of(entry: Entry) -> Recipe:
    of, nodes, asked = model(entry.model), cluster(entry.cluster), entry.run
    if isinstance(asked, Run):
        run, planned_for = asked, of.framework if entry.framework == "megatron" else "deepspeed"
    else:
        run, planned_for = search(asked).plans[0].run, asked.of.name
    found = Recipe.of(of, nodes, run, entry.framework, entry.launcher, Settings.of(()), planned_for)
    refuse(found, engine_of(framework(entry.framework)))
    return found


def planned(of: str, on: str, samples: int, schedules: tuple[str, ...], **asked: int) -> Question:
    """The best that the planner finds for Megatron-LM."""
    named = framework("megatron")
    return Question(
        model(of), cluster(on), samples, engine_of(named), schedules, named, delayed="2bw" in schedules, **asked
    )


def pipedream(stages: int, replicas: int, micro_batch: int, recomputed: bool) -> Run:
    """Return a run under 2BW, sizes as a row of its Table 1: 1,024 samples, in fp16 on GPUs that have no bf16."""
    return Run(
        1024,
        stages=stages,
        data=replicas,
        micro_batch=micro_batch,
        schedule="2bw",
        recompute="full" if recomputed else "none",
        precision="fp16",
        attention="unfused",
    )


CATALOGUE = (
    Entry(
        "bpipe-96b",
        "gpt3-96b",
        "4x8-a100-80gb",
        "megatron",
        "torchrun",
        Run(128, tensor=4, stages=8, micro_batch=2, recompute="selective", bpipe=True),
        "BPipe (Kim et al., ICML 2023), Table 7, configuration 6: the best of 96B",
        "Micro-batches of 2 fit only with BPipe: the paper measured an MFU of 50.64 %, and 40.51 % at best without.",
    ),
    Entry(
        "bpipe-134b",
        "gpt3-134b",
        "6x8-a100-80gb",
        "megatron",
        "slurm",
        Run(192, tensor=4, stages=12, micro_batch=2, recompute="selective", bpipe=True),
        "BPipe, Table 7, configuration 4: the best of 134B",
        "Twelve stages; the paper measured an MFU of 52.06 %, and 41.40 % at best without BPipe.",
    ),
    Entry(
        "2bw-bert-24-1080ti",
        "bert-24",
        "2x8-1080ti",
        "megatron",
        "torchrun",
        pipedream(2, 8, 8, False),
        "BERT of 24 layers with 2BW on GeForce GTX 1080 Ti",
        "Two stages, eight replicas, nothing recomputed.",
    ),
    Entry(
        "2bw-bert-24-v100",
        "bert-24",
        "4x8-v100-16gb",
        "deepspeed",
        "deepspeed",
        pipedream(4, 8, 4, True),
        "BERT of 24 layers with 2BW on V100s of 16 GB",
        "Four stages, eight replicas, micro-batches of 4, all recomputed.",
    ),
    Entry(
        "2bw-bert-48",
        "bert-48",
        "8x8-v100-16gb",
        "deepspeed",
        "slurm",
        pipedream(8, 8, 1, True),
        "BERT of 48 layers with 2BW on V100s of 16 GB",
        "Eight stages and eight replicas.",
    ),
    Entry(
        "2bw-bert-192",
        "bert-192",
        "8x8-v100-16gb",
        "deepspeed",
        "kubernetes",
        pipedream(16, 4, 1, True),
        "BERT of 192 layers with 2BW on V100s of 16 GB",
        "192 layers on sixteen stages, with four replicas.",
    ),
    Entry(
        "bert-large",
        "bert-large",
        "2x8-a100-80gb-100gbit",
        "megatron",
        "torchrun",
        planned("bert-large", "2x8-a100-80gb-100gbit", 1024, ("1f1b", "kfkb"), stages=2),
        "BERT-large (Devlin et al. 2018) on two nodes",
        "A small model on Ethernet: the planner chooses what is divided, and in which groups.",
    ),
    Entry(
        "gpt3-175b-25gbit",
        "gpt3-175b",
        "16x8-a100-80gb-25gbit",
        "megatron",
        "slurm",
        planned("gpt3-175b", "16x8-a100-80gb-25gbit", 512, ("kfkb",), tensor=4, stages=16),
        "GPT-3 175B with kFkB (Ada-Grouper, Wang et al. 2023) on 25 Gb/s a node",
        "Messages of one micro-batch travel while the others of its group are computed.",
    ),
    Entry(
        "llama3-70b",
        "llama3-70b",
        "8x8-h100",
        "megatron",
        "slurm",
        planned("llama3-70b", "8x8-h100", 512, ("1f1b",), stages=8),
        "Llama 3 70B with a planned layout",
        "80 layers do not divide evenly with a head of 128,256 tokens: the last stage has fewer of them.",
    ),
)


def write(folder: Path) -> None:
    """All of them, over what is there."""
    for entry in CATALOGUE:
        recipe = recipe_of(entry)
        write_files(folder / entry.folder, files_of(recipe), force=True)
        draw_entry(recipe, folder / entry.folder / PICTURE)
    write_files(folder, {"README.md": catalogue()}, force=True)


def draw_entry(recipe: Recipe, path: Path) -> None:
    run = recipe.run
    said = (
        f"{recipe.model.name} on {recipe.cluster.name}: tensor {run.tensor} × pipeline {run.stages} × data {run.data}"
    )
    grouped = f" in groups of {run.group_size}" if run.group_size > 1 else ""
    draw(recipe, path, f"{said}, {run.spec.name}{grouped}{' with BPipe' if run.bpipe else ''}")


def catalogue() -> str:
    """The page."""
    return "\n".join([_HEAD, *(_section(entry) for entry in CATALOGUE)])


_HEAD = """\
# Recipes

Configurations that BPipe's paper has measured, and others, as files that start them. Each is what
`evenpipe recipe` writes ([docs/recipes.md](../docs/recipes.md)); `python -m recipes.regenerate` writes all of them,
and a test compares. Copy a folder, change the first lines of its `train.sh`, and `evenpipe recipe --check` says
what no longer fits. Numbers are predictions of `evenpipe estimate` for today's frameworks, where no paper is named;
how far they may be off, each folder's page says.

Left in each picture: what a GPU of each stage needs, and has (the red line). Right: the schedule, on the simulator's
clock; long batches are drawn shorter.
"""


def _section(entry: Entry) -> str:
    recipe = recipe_of(entry)
    found, gib = recipe.estimate, recipe.cluster.device.memory_gib
    takes = f"{found.iteration_ms:,.0f} ms an iteration ({found.uncertainty})"
    most = max(stage.bytes.total for stage in found.stages) / 2**30
    return f"""\
## [{entry.folder}]({entry.folder}/README.md)

{entry.source}; {recipe.cluster.gpus} GPUs, {FRAMEWORKS[recipe.framework]}, {LAUNCHERS[recipe.launcher]}.
{entry.says}
Predicted: {takes}, MFU {found.mfu:.1%}, at most {most:.1f} of {gib:g} GiB.

![{entry.folder}]({entry.folder}/{PICTURE})
"""


if __name__ == "__main__":
    argparse.ArgumentParser(description="Write the recipes, their pictures and the catalogue.").parse_args()
    write(HERE)
