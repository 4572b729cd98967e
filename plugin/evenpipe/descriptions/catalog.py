"""Descriptions by name, from the package's YAML files or a user's own; errors have the path of the key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from evenpipe.descriptions.kinds import Cluster, Described, DescriptionError, Device, Framework, Model, NodeGroup
from evenpipe.wording.nearest import nearest
from evenpipe.wording.validation import plain_message

__all__ = [
    "cluster",
    "described",
    "device",
    "entries",
    "equal_nodes",
    "framework",
    "model",
    "names",
    "node_of",
    "read_file",
    "read_text",
]

_Kind = TypeVar("_Kind", bound=Described)
#: How alike a name is that may have been meant.
_CLOSE: Final = 0.4
_SIZE: Final = re.compile(r"(?P<nodes>[1-9][0-9]*)x(?P<gpus>[1-9][0-9]*)", re.ASCII)
_SIZED: Final = re.compile(rf"{_SIZE.pattern}-(?P<name>.+)", re.ASCII)


def model(name: str) -> Model:
    """Return the model of that name, of the package or, for ``PATH.yaml`` and ``PATH.yaml:NAME``, of a file."""
    return _one(Model, "models", name)


def device(name: str) -> Device:
    """Return the device of that name, found as models are."""
    return _one(Device, "devices", name)


def framework(name: str) -> Framework:
    """Return the framework of that name, found as models are."""
    return _one(Framework, "frameworks", name)


def cluster(name: str) -> Cluster:
    """Return the cluster of that name, found as models are; ``NODESxGPUS-NAME`` is one of that kind in another size.

    So ``4x8-a100-80gb`` are four nodes of eight; of a cluster of a file these are ``PATH.yaml:NAME@4x8``. A node with
    other than the kind's GPUs has the same adapters, which its GPUs share: at most what a GPU's own link to its host
    carries. The device of a cluster is a device's name. A list of ``nodes`` has unlike ones (`NodeGroup`).
    """
    of_any_size, size = _size_of(name)
    where, key, said = _found("clusters", of_any_size, name)
    of_nodes = _of_groups if isinstance(said.get("nodes"), list) else _of_equal_nodes
    found = of_nodes(where, key, name, said)
    return found.of_size(int(size["nodes"]), int(size["gpus"])) if size else found


def equal_nodes(name: str) -> Cluster:
    """Return the cluster of that name, whose nodes are all equal. Raises DescriptionError for unlike ones."""
    found = cluster(name)
    if found.groups:
        raise DescriptionError(f"{name}: has unlike nodes, whose layers evenpipe plan lays out: name equal ones here")
    return found


def _of_equal_nodes(where: str, key: str, name: str, said: Mapping[str, Any]) -> Cluster:
    named = said.get("device")
    if not isinstance(named, str):
        raise DescriptionError(f"{where}: {key}.device: is {named!r}: give a device's name")
    try:
        of = device(named)
    except DescriptionError as error:
        raise DescriptionError(f"{where}: {key}.device: {error}") from None
    if "peer_gbps" not in said:
        sources = {"peer_gbps": f"its device's, {named}", **(said.get("sources") or {})}
        said = {**said, "peer_gbps": of.peer_gbps, "sources": sources}
    return described(Cluster, key, {**said, "device": of}, where).model_copy(update={"name": name})


#: What a group of a cluster's nodes may say, and the cluster for all of them.
_OF_GROUPS: Final = ("device", "peer_gbps", "node_gbps", "latency_us", "node_latency_us")


def _of_groups(where: str, key: str, name: str, said: Mapping[str, Any]) -> Cluster:
    """Return a cluster of a list of nodes; the plain one, where all are equal."""
    shared = {word: said[word] for word in _OF_GROUPS if word in said}
    groups: list[Cluster] = []
    for number, one in enumerate(said["nodes"]):
        path = f"{key}.nodes.{number}"
        if not isinstance(one, dict):
            raise DescriptionError(f"{where}: {path}: is {one!r}: write device, count and what else is its own")
        group = described(NodeGroup, path, {**shared, **one}, where)
        words = group.model_dump(include={*_OF_GROUPS, "slowness"}, exclude_none=True)
        words |= {"nodes": group.count, "gpus_per_node": said.get("gpus_per_node")}
        found = _of_equal_nodes(where, path, name, words)
        if groups and groups[-1].model_copy(update={"nodes": found.nodes}) == found:
            groups[-1] = found.model_copy(update={"nodes": groups[-1].nodes + found.nodes})
        else:
            groups.append(found)
    if not groups:
        raise DescriptionError(f"{where}: {key}.nodes: is an empty list: write device and count of each kind of nodes")
    if len(groups) == 1:
        return groups[0].model_copy(update={"sources": {**groups[0].sources, **(said.get("sources") or {})}})
    roomy = max((group.device for group in groups), key=lambda device: device.memory_gib)
    words = {word: value for word, value in said.items() if word not in ("nodes", "device")}
    words |= {"nodes": sum(group.nodes for group in groups), "device": roomy, "groups": tuple(_numbered(groups))}
    found = described(Cluster, key, {"peer_gbps": roomy.peer_gbps, **words}, where)
    return found.model_copy(update={"name": name})


def _numbered(groups: Iterable[Cluster]) -> Iterator[Cluster]:
    """Yield them with a name that says which nodes they are, from 0."""
    first = 0
    for group in groups:
        end = first + group.nodes
        nodes = f"node {first}" if group.nodes == 1 else f"nodes {first}-{end - 1}"
        slow = f", slowness {group.slowness:g}" if group.slowness > 1 else ""
        yield group.model_copy(update={"name": f"{nodes} ({group.device.name}{slow})"})
        first = end


def _size_of(name: str) -> tuple[str, re.Match[str] | None]:
    """Return the name without a size, and the size, if there is one."""
    if ".yaml" not in name:
        size = _SIZED.fullmatch(name)
        return (size["name"], size) if size else (name, None)
    path, at, words = name.rpartition("@")
    if not at or ".yaml" not in path:
        return name, None
    if (size := _SIZE.fullmatch(words)) is None:
        raise DescriptionError(f"{name}: {words!r} is no size: write @NODESxGPUS, such as {path}@16x8")
    return path, size


def node_of(device: Device, gpus: int) -> Cluster:
    """One node of so many GPUs, with the latencies that the package's clusters have within a node."""
    update = {"name": device.name, "gpus_per_node": gpus, "device": device, "peer_gbps": device.peer_gbps}
    return cluster("a100-80gb").model_copy(update=update)


def names(room: str) -> list[str]:
    """Return what there is in the package: ``room`` is models, devices, clusters or frameworks."""
    return [name for found in entries(room).values() for name in found]


def _one(kind: type[_Kind], room: str, name: str) -> _Kind:
    where, key, said = _found(room, name)
    return described(kind, key, said, where)


def _found(room: str, name: str, asked: str | None = None) -> tuple[str, str, Mapping[str, Any]]:
    """Return where it is described, under which name, and what is said of it. ``asked``: the name in an error."""
    path, _, key = name.partition(".yaml")
    if path != name:
        path, key = f"{path}.yaml", key.removeprefix(":")
        own = read_file(Path(path), room)
        if not key and len(own) > 1:
            raise DescriptionError(f"{path}: describes {', '.join(own)}: say which, as {path}:{next(iter(own))}")
        key = key or next(iter(own))
        if key not in own:
            raise DescriptionError(f"{path}: no {key} among its {room}, {nearest(key, own, _CLOSE)}")
        return path, key, own[key]
    for file, found in entries(room).items():
        if name in found:
            return file, name, found[name]
    if room == "models" and name.endswith(".json"):
        raise DescriptionError(f"{asked or name}: a JSON file is none of {room}: give a config.json by --hf")
    near = nearest(name, names(room), _CLOSE)
    other = " Or" if near.endswith("?") else "; or"
    raise DescriptionError(f"{asked or name}: unknown among {room}, {near}{other} give a YAML file")


Entries = Mapping[str, Mapping[str, Any]]


@cache
def entries(room: str) -> Mapping[str, Entries]:
    """By file name, what the package's own files of a kind (``models``, ``devices``, ...) describe."""
    folder = files("evenpipe.descriptions") / "data" / room
    found = (file for file in folder.iterdir() if file.name.endswith(".yaml"))
    return {file.name: _parsed(file.read_text(encoding="utf-8"), file.name, room) for file in sorted(found, key=str)}


#: Of a user's own file.
_MOST_CHARACTERS: Final = 2**22


def read_file(path: Path, room: str) -> Entries:
    """Return what a user's own file describes. Raises DescriptionError."""
    return _parsed(read_text(path, f"a YAML file of {room}"), str(path), room)


def read_text(path: Path, wanted: str) -> str:
    """Return the text of a user's own file, of no more than 4 MiB characters. Raises DescriptionError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "is no text"
        raise DescriptionError(f"{path}: {said}: name {wanted}") from None
    if len(text) > _MOST_CHARACTERS:
        raise DescriptionError(f"{path}: has more than {_MOST_CHARACTERS:,} characters: name {wanted}")
    return text


def _parsed(text: str, where: str, room: str) -> Entries:
    """``room:`` in it has the descriptions by name; ``defaults:`` what all of them have that do not say otherwise."""
    try:
        document = yaml.safe_load(text)
    except RecursionError:
        raise DescriptionError(f"{where}: is nested too deeply: correct it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        said = getattr(error, "problem", None) or error
        raise DescriptionError(f"{where}: {line}is no YAML ({' '.join(str(said).split())}): correct it") from None
    if not isinstance(document, dict) or not isinstance(document.get(room), dict) or not document[room]:
        raise DescriptionError(f"{where}: has no {room}: write `{room}:`, and under it a name and what is said of it")
    unknown = [str(key) for key in document if key not in (room, "defaults")]
    if unknown:
        raise DescriptionError(f"{where}: {unknown[0]}: unknown key, {nearest(unknown[0], [room, 'defaults'], _CLOSE)}")
    defaults = document.get("defaults") or {}
    for name, said in [("defaults", defaults), *((f"{room}.{name}", one) for name, one in document[room].items())]:
        if not isinstance(said, dict):
            raise DescriptionError(f"{where}: {name}: is {said!r}: write keys and values under it")
        if not isinstance(said.get("sources") or {}, dict):
            raise DescriptionError(f"{where}: {name}.sources: is {said['sources']!r}: write a source under each key")
    shared = defaults.get("sources") or {}
    return {
        str(name): {**defaults, **said, "sources": {**shared, **(said.get("sources") or {})}}
        for name, said in document[room].items()
    }


def described(
    kind: type[_Kind], name: str, said: Mapping[str, Any], where: str, spelled: Mapping[str, str] = MappingProxyType({})
) -> _Kind:
    """The description of these values. Raises DescriptionError with the file and the path of the key that is wrong.

    spelled: what the user has in place of our keys: flags, or keys of another file.
    """
    try:
        return kind.model_validate({**said, "name": name})
    except ValidationError as error:
        # A key that nobody reads is often the misspelled one that is missing.
        fault = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        keys = [str(key) for key in fault["loc"]]
        path = ".".join([name, *keys]) if ".".join(keys) not in spelled else spelled[".".join(keys)]
        if fault["type"] == "extra_forbidden":
            hint = nearest(keys[-1], _keys(kind, keys), _CLOSE)
            raise DescriptionError(f"{where}: {path}: unknown key, {hint}") from None
        message = _respelled(plain_message(fault), spelled)
        raise DescriptionError(f"{where}: {path}: {message[:1].lower()}{message[1:]}") from None


def _respelled(message: str, spelled: Mapping[str, str]) -> str:
    """Return the message with the user's words for our keys: hidden=64 may be --hidden-size 64."""

    def word(found: re.Match[str]) -> str:
        theirs = spelled.get(found[1], found[1])
        return f"{theirs} " if found[2] and theirs.startswith("--") else f"{theirs}{found[2]}"

    return re.sub(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)?)(=|$)", word, message)


def _keys(kind: type[BaseModel], path: list[str]) -> list[str]:
    """Return the keys that there are where the last of ``path`` is not one."""
    for key in path[:-1]:
        annotation = kind.model_fields[key].annotation
        inner = [annotation, *getattr(annotation, "__args__", ())]
        kind = next(one for one in inner if isinstance(one, type) and issubclass(one, BaseModel))
    return list(kind.model_fields)
