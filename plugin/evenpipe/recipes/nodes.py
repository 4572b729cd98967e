"""How many nodes and GPUs each file of a recipe says there are: all have to say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from evenpipe.recipes.errors import RecipeError
from evenpipe.recipes.reading import Script
from evenpipe.recipes.written import Written

__all__ = ["Nodes", "nodes_of"]


class Nodes(NamedTuple):
    """``where``: the file, and its words for it; None where it does not say."""

    where: str
    nodes: int | None
    gpus: int | None


def nodes_of(written: Written, script: Script) -> list[Nodes]:
    """What trains first, then what starts it. Raises RecipeError, one line, for a file that does not start."""
    sizes = [_whole(script.variables.get(name)) for name in ("NODES", "GPUS_PER_NODE")]
    found = [Nodes("train.sh: NODES, GPUS_PER_NODE", *sizes)] if any(sizes) else []
    return [*found, *_started(written)]


def _started(written: Written) -> Iterator[Nodes]:
    if text := written.files.get("launch.sbatch"):
        said = [_whole(_option(text, name)) for name in ("nodes", "gpus-per-node")]
        yield Nodes("launch.sbatch: --nodes, --gpus-per-node", *said)
    if (text := written.files.get("hostfile")) is not None:
        slots = _slots(text)
        yield Nodes("hostfile: lines, slots", len(slots), next(iter(slots.values())))
    elif text := written.files.get("launch.sh"):
        gpus = re.search(r"--num_gpus[ =](\d+)", text)
        yield Nodes("launch.sh: --num_gpus", 1, int(gpus[1]) if gpus else None)
    if written.job is not None:
        yield from _of_a_job(written.job)


def _slots(text: str) -> dict[str, int]:
    """GPUs of each host of a hostfile. Raises RecipeError for one that DeepSpeed's launcher does not read."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.partition("#")[0].strip()):
            continue
        said = re.fullmatch(r"(\S+)\s+slots=([1-9][0-9]*)", words, re.ASCII)
        if said is None:
            raise RecipeError(f"hostfile:{number}: {words!r} is no host: write NAME slots=GPUS")
        if said[1] in found:
            raise RecipeError(f"hostfile:{number}: {said[1]} is there twice: name each host once")
        found[said[1]] = int(said[2])
    if len({*found.values()}) != 1:
        raise RecipeError("hostfile: give hosts, all with the same slots: stages are divided evenly")
    return found


def _of_a_job(job: Any) -> Iterator[Nodes]:
    """Of a PyTorchJob, whose pods' limits have to hold its processes. Raises RecipeError for what is no such number."""
    roles = _at(job, "spec", "pytorchReplicaSpecs")
    if not isinstance(roles, dict):
        raise RecipeError("job.yaml: spec.pytorchReplicaSpecs has no roles: keep what `evenpipe recipe` wrote")
    replicas = 0
    for role, said in roles.items():
        count = _at(said, "replicas")
        if count is not None and _whole(count) is None:
            raise RecipeError(f"job.yaml: {role}: replicas: {count!r} is no whole number: give one")
        replicas += 1 if count is None else int(count)
    yield Nodes("job.yaml: replicas, nprocPerNode", replicas, _whole(_at(job, "spec", "nprocPerNode")))
    for role, said in roles.items():
        containers = _at(said, "template", "spec", "containers")
        for container in containers if isinstance(containers, list) else []:
            limit = _at(container, "resources", "limits", "nvidia.com/gpu")
            if limit is not None and _whole(limit) is None:
                raise RecipeError(f"job.yaml: {role}: nvidia.com/gpu: {limit!r} is no whole number: give one")
            yield Nodes(f"job.yaml: {role}'s nvidia.com/gpu", None, _whole(limit))


def _at(document: Any, *keys: str) -> Any:
    """What stands there; None where nothing does."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _option(text: str, name: str) -> str | None:
    found = re.search(rf"^#SBATCH\s.*--{name}[ =](\S+)", text, re.MULTILINE)
    return found[1] if found else None


def _whole(text: object) -> int | None:
    return int(str(text)) if text is not None and str(text).isdecimal() else None
