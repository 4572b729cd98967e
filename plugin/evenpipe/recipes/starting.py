"""Check what starts a recipe's run: programs of its scripts, tasks of Slurm, and the flags that a resume compares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any, Final

from evenpipe.recipes.reading import UNKNOWN, Script
from evenpipe.recipes.written import Written

__all__ = ["not_looked_at", "wrong_starts"]

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
    for option, count in re.findall(r"--(ntasks-per-node|ntasks)[ =](\d+)", _read_by_slurm(text)):
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
        & {
            "--override-opt_param-scheduler",
            "--override-opt-param-scheduler",
            "--use-checkpoint-opt-param-scheduler",
        }
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


def _read_by_slurm(text: str) -> str:
    """Return the lines of a job's script without comments."""
    return "\n".join(line for line in text.splitlines() if line.startswith("#SBATCH") or not line.startswith("#"))


def _commands(job: Any) -> Iterator[Any]:
    """Yield what each container of a job starts; ``nodes_of`` has checked the job's form before."""
    if job is None:
        return
    for role in job["spec"]["pytorchReplicaSpecs"].values():
        for container in role.get("template", {}).get("spec", {}).get("containers", []):
            if "command" in container:
                yield container["command"]
