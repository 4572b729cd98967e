"""What no longer fits of a recipe that was edited: sizes, memory, layout, starts, and contradicting files."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePath
from shutil import which
from typing import Any, Final

from evenpipe.descriptions import Cluster, DescriptionError, Model, framework
from evenpipe.planner.arguments import FlagError
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.search.question import Engine
from evenpipe.recipes import deepspeed, megatron
from evenpipe.recipes.reading import UNKNOWN, Nodes, Script, Written, nodes_of, read_script
from evenpipe.recipes.recipe import Recipe, RecipeError, Settings
from evenpipe.recipes.unsupported import refuse, refuse_before_planning
from evenpipe.settings.config import EvenPipeConfig
from evenpipe.settings.spelling import in_flags

__all__ = ["Checked", "check", "not_looked_at", "wrong_starts"]

#: What each script's last command is started by.
_PROGRAMS: Final = {"train.sh": ("torchrun", "python"), "launch.sh": ("deepspeed",), "launch.sbatch": ("srun",)}
#: Directives whose values are compared, and those that change nothing of the run.
_DIRECTIVES: Final = frozenset(
    ("job-name", "partition", "account", "time", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node")
) | {"exclusive", "output", "error", "mail-type", "mail-user"}
_STARTED: Final = ["bash", "/recipe/train.sh"]
_PYTHON: Final = re.compile(r"python[0-9.]*")
_CLOSE: Final = 0.75


def wrong_starts(written: Written, script: Script) -> Iterator[str]:
    """Yield a line for each reason why the job would not start train.sh once on each node."""
    for name, program in _programs(written, script):
        if near := get_close_matches(program, _PROGRAMS[name], 1, _CLOSE) if not _is_known(name, program) else []:
            yield f"{name}: {program}: there is no such program: did you mean {near[0]}?"
    text = written.files.get("launch.sbatch", "")
    read = "\n".join(line for line in text.splitlines() if line.startswith("#SBATCH") or not line.startswith("#"))
    for option, count in re.findall(r"--(ntasks-per-node|ntasks)[ =](\d+)", read):
        nodes = re.search(r"^#SBATCH\s.*--nodes[ =](\d+)", text, re.MULTILINE)
        expected = "1" if option == "ntasks-per-node" else nodes and nodes[1]
        if expected is not None and int(count) != int(expected):
            yield (
                f"launch.sbatch: --{option}={count}: train.sh starts a process for each GPU of its node itself: "
                f"use --{option}={expected}"
            )


def not_looked_at(written: Written, script: Script, flags: list[str]) -> Iterator[str]:
    """Yield a line for everything of the start that this check does not judge."""
    for name, program in _programs(written, script):
        if not _is_known(name, program) and not get_close_matches(program, _PROGRAMS[name], 1, _CLOSE):
            shown = "a word that is known only when it runs" if program == UNKNOWN else program
            yield f"{name}: {shown}: starts the run: not looked at"
    for option in re.findall(r"^#SBATCH\s+-{1,2}([A-Za-z-]+)", written.files.get("launch.sbatch", ""), re.MULTILINE):
        if option not in _DIRECTIVES:
            yield f"launch.sbatch: {'--' if len(option) > 1 else '-'}{option}: not looked at"
    for command in _commands(written.job):
        if command != _STARTED:
            yield f"job.yaml: command {command}: starts the run: not looked at"
    given = {word.partition("=")[0] for word in flags}
    if (
        written.about.framework == "megatron"
        and {"--load", "--train-iters"} <= given
        and not given
        & {"--override-opt_param-scheduler", "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"}
    ):
        yield (
            "train.sh: Megatron-LM refuses to resume once --train-iters or --global-batch-size is another: then give "
            "--lr-decay-iters and --override-opt_param-scheduler"
        )


def _is_known(name: str, program: str) -> bool:
    return program in _PROGRAMS[name] or (name == "train.sh" and _PYTHON.fullmatch(program) is not None)


def _programs(written: Written, script: Script) -> Iterator[tuple[str, str]]:
    """Yield each script with the program that its last command starts."""
    words = [word for word in script.command if word != "exec"]
    yield "train.sh", words[0] if words[0] == UNKNOWN else PurePath(words[0]).name
    for name in ("launch.sh", "launch.sbatch"):
        started = re.findall(r"^\s*exec\s+(\S+)", written.files.get(name, ""), re.MULTILINE)
        if started:
            yield name, PurePath(started[-1]).name


def _commands(job: Any) -> Iterator[Any]:
    """Yield what each container of a job starts; ``nodes_of`` has checked the job's form before."""
    if job is None:
        return
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        for container in role.get("template", {}).get("spec", {}).get("containers", []):
            if "command" in container:
                yield container["command"]


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
        nodes = _cluster(written, every)
    except (RecipeError, DescriptionError) as error:
        return Checked((*problems, str(error)), ())
    problems += [*wrong_starts(written, script), *_contradictions(every)]
    unknown, flags = _known(flags)
    notes = [f"{name}: is known only when it runs: not looked at" for name in unknown]
    notes += not_looked_at(written, script, [*flags, *unknown])
    found: Estimate | None = None
    try:
        of, run, unread = _described(written, flags, nodes, section)
        if unread:
            notes.append(f"{' '.join(unread)}: for Megatron-LM's own parser to judge")
        settings = Settings.of([f"release={written.about.release}"])
        recipe = Recipe(of, nodes, run, written.about.framework, written.about.launcher, settings)
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
    """Yield the first error of bash, if it does not parse the script; nothing where there is no bash."""
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
    words = script.command[script.command.index("evenpipe") + 2 :]
    at = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        raise RecipeError("train.sh: `evenpipe run` is given no script: name one behind it")
    return words[at], words[at + 1 :]


def _known(flags: list[str]) -> tuple[list[str], list[str]]:
    """Return what only a shell could tell, by the flag that it is for, and the words without it."""
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
        of, run = deepspeed.described_by(flags, about.model.name, configuration, section(configuration), nodes.gpus)
        return of, run, []
    causal, vocabulary = about.model.causal, about.model.vocabulary
    found = megatron.described_by(flags, about.model.name, causal, nodes.gpus, vocabulary, expandable=True)
    return found.model, found.run, found.unread
