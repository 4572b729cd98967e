"""How many nodes and GPUs each file of a recipe says there are: all have to say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from evenpipe.recipes.reading import Script
from evenpipe.recipes.written import Written

__all__ = ["Nodes", "nodes_of"]


class Nodes(NamedTuple):
    """``where``: the file, and its words for it; None where it does not say."""

    where: str
    nodes: int | None
    gpus: int | None


def nodes_of(written: Written, script: Script) -> list[Nodes]:
    """What trains first, then what starts it."""
    sizes = [_whole(script.variables.get(name)) for name in ("NODES", "GPUS_PER_NODE")]
    found = [Nodes("train.sh: NODES, GPUS_PER_NODE", *sizes)] if any(sizes) else []
    return [*found, *_started(written)]


def _started(written: Written) -> Iterator[Nodes]:
    if text := written.files.get("launch.sbatch"):
        said = [_whole(_option(text, name)) for name in ("nodes", "gpus-per-node")]
        yield Nodes("launch.sbatch: --nodes, --gpus-per-node", *said)
    if text := written.files.get("hostfile"):
        slots = re.findall(r"^[^\s#]+\s+slots=(\d+)", text, re.MULTILINE)
        alike = int(slots[0]) if slots and len(set(slots)) == 1 else None
        yield Nodes("hostfile: lines, slots", len(slots), alike)
    elif text := written.files.get("launch.sh"):
        gpus = re.search(r"--num_gpus[ =](\d+)", text)
        yield Nodes("launch.sh: --num_gpus", 1, int(gpus[1]) if gpus else None)
    if written.job is not None:
        spec = written.job.get("spec") or {}
        roles = spec.get("pytorchReplicaSpecs") or {}
        replicas = sum(int((role or {}).get("replicas", 1)) for role in roles.values())
        yield Nodes("job.yaml: replicas, nprocPerNode", replicas, _whole(spec.get("nprocPerNode")))


def _option(text: str, name: str) -> str | None:
    found = re.search(rf"^#SBATCH\s.*--{name}[ =](\S+)", text, re.MULTILINE)
    return found[1] if found else None


def _whole(text: object) -> int | None:
    return int(str(text)) if text is not None and str(text).isdecimal() else None
