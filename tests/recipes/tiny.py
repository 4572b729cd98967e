"""Recipes of tiny models, and what a file of theirs hands to the program that it starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from evenpipe.descriptions import Cluster, Model, cluster, described
from evenpipe.planner.run import Run
from evenpipe.recipes import Recipe, Settings
from evenpipe.recipes.recipe import Framework, Launcher

__all__ = ["FOUR_GPUS", "TWO_NODES", "argv_of", "bert", "gpt", "recipe_of", "starter"]

FOUR_GPUS, TWO_NODES = "1x4-a100-80gb", "2x4-a100-80gb"
#: Writes its arguments to $RECORD, each ended by a NUL.
_RECORDER = '#!/usr/bin/env bash\nprintf \'%s\\0\' "$@" > "$RECORD"\n'


def gpt(name: str = "tiny-gpt") -> Model:
    said = {"layers": 8, "hidden": 64, "heads": 4, "vocabulary": 8192, "sequence": 64, "dropout": False}
    return described(Model, name, said, "the test")


def bert(name: str = "tiny-bert") -> Model:
    said = {"layers": 8, "hidden": 64, "heads": 4, "vocabulary": 256, "sequence": 64, "dropout": False}
    return described(Model, name, {**said, "causal": False}, "the test")


def recipe_of(
    framework: Framework = "megatron",
    launcher: Launcher = "torchrun",
    settings: Mapping[str, str] | Sequence[str] = (),
    on: str | Cluster = FOUR_GPUS,
    of: Model | None = None,
    **run: object,
) -> Recipe:
    """Four stages, BPipe, eight micro-batches of one sample in each replica, unless told otherwise."""
    given = [f"{key}={value}" for key, value in settings.items()] if isinstance(settings, Mapping) else settings
    nodes = cluster(on) if isinstance(on, str) else on
    data = nodes.gpus // (int(str(run.get("tensor", 1))) * int(str(run.get("stages", 4))))
    asked = Run(**{"global_batch": 8 * data, "stages": 4, "data": data, "bpipe": True, "precision": "fp32"} | run)  # type: ignore[arg-type]
    return Recipe.of(of or gpt(), nodes, asked, framework, launcher, Settings.of(given))


def starter(folder: Path, *programs: str) -> dict[str, str]:
    """An environment in which these programs only write down what they are given."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for program in programs:
        (bin_folder / program).write_text(_RECORDER)
        (bin_folder / program).chmod(0o755)
    return {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "RECORD": str(folder / "record")}


def argv_of(command: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None) -> list[str]:
    """What the program that `command` starts at last was given."""
    done = subprocess.run(command, env=dict(environment), cwd=cwd, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return [word.decode() for word in Path(environment["RECORD"]).read_bytes().split(b"\0")[:-1]]
