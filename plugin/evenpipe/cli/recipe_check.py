"""``evenpipe recipe --check``: what no longer fits of a recipe that was edited, and Megatron-LM's own word for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenpipe.cli.parser import UsageError
from evenpipe.cli.plan_engine import engine_of
from evenpipe.cli.run_estimate import in_megatron
from evenpipe.deepspeed.section import SectionError, section_of
from evenpipe.planner.descriptions import framework
from evenpipe.recipes import RecipeError
from evenpipe.recipes.checking import Checked, check
from evenpipe.recipes.written import Written, read_folder
from evenpipe.settings.config import EvenPipeConfig

__all__ = ["show_check"]


def show_check(folder: Path, checkout: Path | None) -> int:
    """Print problems and what was not looked at; 1 where there are problems. UsageError for what is no recipe."""
    try:
        written = read_folder(folder)
    except RecipeError as error:
        raise UsageError(f"--check {error}") from error
    found = check(written, engine_of(framework(written.about.framework)), _section)
    problems, notes = list(found.problems), list(found.notes)
    if written.about.framework == "megatron":
        problems = [in_megatron(line) for line in problems]
        if found.script:
            said, note = _by_megatron(written, found, checkout)
            problems += said
            notes += note
    for line in problems:
        print(" ".join(line.split()))
    for line in notes:
        print(f"note: {' '.join(line.split())}")
    if found.estimate is not None and not problems:
        estimate = found.estimate
        most = max(stage.bytes.total for stage in estimate.stages) / 2**30
        gib = written.about.cluster.device.memory_gib
        print(
            f"{folder}: fits: {most:.1f} of {gib:g} GiB, {estimate.iteration_ms:,.0f} ms an iteration, "
            f"MFU {estimate.mfu:.1%}"
        )
    return 1 if problems else 0


def _section(configuration: Mapping[str, Any]) -> EvenPipeConfig | None:
    try:
        return section_of(configuration)
    except SectionError as error:
        raise RecipeError(f"ds_config.json: {error}") from None


def _by_megatron(written: Written, found: Checked, checkout: Path | None) -> tuple[list[str], list[str]]:
    """Problems that its own parser and `validate_args` find, and what to say if they were not asked.

    They are code of the checkout, so that only one is asked that the user has named, never the one in what is checked.
    """
    script = Path(found.script)
    if checkout is None:
        named = f"name a checkout that you trust with --megatron-lm, such as {script.parent}"
        return [], [f"flags were not given to Megatron-LM's own parser, which would execute its code: {named}"]
    path = checkout / script.name
    if not (path.is_file() and (path.parent / "megatron" / "training").is_dir()):
        raise UsageError(f"--megatron-lm {checkout}: has no {script.name} and megatron/training: name a checkout")
    nodes = found.cluster or written.about.cluster
    flags = list(found.flags)
    if not any(word.partition("=")[0] == "--vocab-size" for word in flags):
        flags += ["--vocab-size", str(written.about.model.vocabulary)]
    asked = ["--estimate", "--cluster", f"{nodes.nodes}x{nodes.gpus_per_node}-a100-80gb", str(path), *flags]
    command = [sys.executable, "-m", "evenpipe", "run", *asked]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if not done.returncode:
        return [], []
    last = (done.stderr.strip().splitlines() or ["ended without a word"])[-1]
    said = last.removeprefix("evenpipe run: error: ")
    return ([] if said in found.problems else [f"{path}: {said}"]), []
