"""Models, devices, clusters and frameworks by name, or from a user's own file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from evenpipe.planner.descriptions.clusters import Cluster
from evenpipe.planner.descriptions.described import Described
from evenpipe.planner.descriptions.devices import Device
from evenpipe.planner.descriptions.errors import DescriptionError
from evenpipe.planner.descriptions.files import described, entries, nearest, read_file
from evenpipe.planner.descriptions.frameworks import Framework
from evenpipe.planner.descriptions.models import Model

__all__ = ["cluster", "device", "framework", "model", "names"]

_Kind = TypeVar("_Kind", bound=Described)
_SIZED = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)-(.+)", re.ASCII)


def model(name: str) -> Model:
    """The model of that name, of the package or, for ``PATH.yaml`` and ``PATH.yaml:NAME``, of a file."""
    return _one(Model, "models", name)


def device(name: str) -> Device:
    """The device of that name, found as models are."""
    return _one(Device, "devices", name)


def framework(name: str) -> Framework:
    """The framework of that name, found as models are."""
    return _one(Framework, "frameworks", name)


def cluster(name: str) -> Cluster:
    """The cluster of that name, found as models are; ``NODESxGPUS-NAME`` is one of that kind in another size.

    So ``4x8-a100-80gb`` are four nodes of eight. A node with other than the kind's GPUs has the same adapters, which
    its GPUs share: at most what a GPU's own link to its host carries. The device of a cluster is a device's name.
    """
    where, key, said = _found("clusters", name)
    named = said.get("device")
    if not isinstance(named, str):
        raise DescriptionError(f"{where}: {key}.device: is {named!r}: give a device's name")
    of = device(named)
    if "peer_gbps" not in said:
        sources = {"peer_gbps": f"its device's, {named}", **(said.get("sources") or {})}
        said = {**said, "peer_gbps": of.peer_gbps, "sources": sources}
    found = described(Cluster, name, {**said, "device": of}, where)
    sized = _SIZED.fullmatch(name)
    return found.of_size(int(sized[1]), int(sized[2])) if sized and key != name else found


def names(room: str) -> list[str]:
    """What there is in the package: ``room`` is models, devices, clusters or frameworks."""
    return [name for found in entries(room).values() for name in found]


def _one(kind: type[_Kind], room: str, name: str) -> _Kind:
    where, key, said = _found(room, name)
    return described(kind, key, said, where)


def _found(room: str, name: str) -> tuple[str, str, Mapping[str, Any]]:
    """Where it is described, under which name, and what is said of it."""
    path, _, key = name.partition(".yaml")
    if path != name:
        path, key = f"{path}.yaml", key.removeprefix(":")
        own = read_file(Path(path), room)
        if not key and len(own) > 1:
            raise DescriptionError(f"{path}: describes {', '.join(own)}: say which, as {path}:{next(iter(own))}")
        key = key or next(iter(own))
        if key not in own:
            raise DescriptionError(f"{path}: no {key} among its {room}, {nearest(key, list(own))}")
        return path, key, own[key]
    sized = _SIZED.fullmatch(name) if room == "clusters" else None
    for wanted in (name, sized[3]) if sized else (name,):
        for file, found in entries(room).items():
            if wanted in found:
                return file, wanted, found[wanted]
    near = nearest(sized[3] if sized else name, names(room))
    raise DescriptionError(f"{name}: unknown among {room}, {near}; or give a YAML file")
