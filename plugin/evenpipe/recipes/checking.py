"""What no longer fits of a recipe that was edited: sizes, memory, layout, and files that contradict each other."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from shutil import which
from typing import Any

from evenpipe.planner.arguments import FlagError
from evenpipe.planner.descriptions import Cluster, DescriptionError, Model, framework
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.search.question import Engine
from evenpipe.recipes import deepspeed_run, megatron_run
from evenpipe.recipes.errors import RecipeError
from evenpipe.recipes.nodes import Nodes, nodes_of
from evenpipe.recipes.reading import UNKNOWN, Script, read_script
from evenpipe.recipes.recipe import Recipe
from evenpipe.recipes.settings import Settings
from evenpipe.recipes.starting import not_looked_at, wrong_starts
from evenpipe.recipes.unsupported import refuse, refuse_before_planning
from evenpipe.recipes.written import Written
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import in_flags

__all__ = ["Checked", "check"]

#: A checked section of DeepSpeed's configuration. Raises RecipeError.
ReadSection = Callable[[Mapping[str, Any]], EvenPipeConfig | None]


@dataclass(frozen=True)
class Checked:
    """``problems``: why it does not start or fit, a line each; ``notes``: what was not looked at.

    flags: those of the script; estimate, cluster: of the recipe as it is now, where it can be.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    flags: tuple[str, ...] = ()
    script: str = ""
    cluster: Cluster | None = None
    estimate: Estimate | None = None


def check(written: Written, engine: Engine, section: ReadSection) -> Checked:
    """Everything that can be told without running it, and without the framework."""
    problems = [line for name, text in written.files.items() if text.startswith("#!") for line in _syntax(name, text)]
    try:
        script = read_script(written.files["train.sh"], "train.sh")
        path, flags = _command(script)
        every = nodes_of(written, script)
    except RecipeError as error:
        return Checked((*problems, str(error)), ())
    problems += [*wrong_starts(written, script), *_contradictions(every)]
    nodes = _cluster(written, every)
    unknown, flags = _known(flags)
    notes = [f"{name}: is known only when it runs: not looked at" for name in unknown]
    notes += not_looked_at(written, script, [*flags, *unknown])
    found: Estimate | None = None
    try:
        of, run, unread = _described(written, flags, nodes, section)
        if unread:
            notes.append(f"{' '.join(unread)}: for Megatron-LM's own parser to judge")
        recipe = Recipe(of, nodes, run, written.about.framework, written.about.launcher, _settings(written))
        refuse_before_planning(recipe.kind, of, recipe.framework, recipe.settings)
        refuse(recipe, engine)
        found = Estimator(of, nodes, framework(written.about.framework))(run)
        if found.reason is not None:
            problems.append(found.reason)
    except (FlagError, DescriptionError, RecipeError) as error:
        problems.append(str(error))
    except EstimateError as error:
        problems.append(in_flags(error))
    return Checked(tuple(problems), tuple(notes), tuple(flags), path, nodes, found)


def _syntax(name: str, text: str) -> Iterator[str]:
    """What bash itself does not read."""
    if (bash := which("bash")) is None:
        return
    done = subprocess.run([bash, "-n"], input=text.encode(), capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["bash does not read it"]
        yield f"{name}: {said[0].removeprefix('bash: ')}"


def _contradictions(every: Sequence[Nodes]) -> Iterator[str]:
    for one in every[1:]:
        for what, first, other in (("nodes", every[0].nodes, one.nodes), ("GPUs a node", every[0].gpus, one.gpus)):
            if None not in (first, other) and first != other:
                yield f"{one.where}: {other} {what}, {every[0].where}: {first}: change one of them"


def _cluster(written: Written, every: Sequence[Nodes]) -> Cluster:
    """In the size that the files say."""
    planned = written.about.cluster
    nodes = next((one.nodes for one in every if one.nodes), planned.nodes)
    gpus = next((one.gpus for one in every if one.gpus), planned.gpus_per_node)
    if (nodes, gpus) == (planned.nodes, planned.gpus_per_node):
        return planned
    name = f"{nodes}x{gpus}-{planned.name.partition('-')[2] or planned.name}"
    return planned.of_size(nodes, gpus).model_copy(update={"name": name})


def _command(script: Script) -> tuple[str, list[str]]:
    """The training script, and its flags."""
    words = script.command[script.command.index("evenpipe") + 2 :]
    at = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        raise RecipeError("train.sh: `evenpipe run` is given no script: name one behind it")
    return words[at], words[at + 1 :]


def _known(flags: list[str]) -> tuple[list[str], list[str]]:
    """What only a shell could tell, by the flag that it is for, and the words without it."""
    unknown: list[str] = []
    known: list[str] = []
    for word in flags:
        if word != UNKNOWN:
            known.append(word)
        elif known and known[-1].startswith("--"):
            unknown.append(known.pop())
        else:
            unknown.append("a word of the command")
    return unknown, known


def _described(
    written: Written, flags: list[str], nodes: Cluster, section: ReadSection
) -> tuple[Model, Run, list[str]]:
    about = written.about
    if about.framework == "deepspeed":
        configuration = written.configuration
        if not isinstance(configuration, dict):
            raise RecipeError("ds_config.json: is no object: keep what `evenpipe recipe` wrote")
        of, run = deepspeed_run.described_by(flags, about.model.name, configuration, section(configuration), nodes.gpus)
        return of, run, []
    causal, vocabulary = about.model.causal, about.model.vocabulary
    found = megatron_run.described_by(flags, about.model.name, causal, nodes.gpus, vocabulary)
    return found.model, found.run, found.unread


def _settings(written: Written) -> Settings:
    return Settings.of([f"release={written.about.release}"])
