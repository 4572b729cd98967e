"""Descriptions in YAML files: read, merged with their family's defaults, and checked, errors with the key's path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from evenpipe.planner.descriptions.described import Described
from evenpipe.planner.descriptions.errors import DescriptionError

__all__ = ["described", "entries", "nearest", "read_file"]

Entries = Mapping[str, Mapping[str, Any]]
_Kind = TypeVar("_Kind", bound=Described)


def nearest(name: str, names: list[str]) -> str:
    """What to say after an unknown name."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


@cache
def entries(room: str) -> Mapping[str, Entries]:
    """By file name, what the package's own files of a kind (``models``, ``devices``, ...) describe."""
    folder = files("evenpipe.planner.descriptions") / "data" / room
    found = (file for file in folder.iterdir() if file.name.endswith(".yaml"))
    return {file.name: _parsed(file.read_text(encoding="utf-8"), file.name, room) for file in sorted(found, key=str)}


#: Of a user's own file.
_MOST_CHARACTERS: Final = 2**22


def read_file(path: Path, room: str) -> Entries:
    """What a user's own file describes. Raises DescriptionError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "is no text"
        raise DescriptionError(f"{path}: {said}: name a YAML file of {room}") from None
    if len(text) > _MOST_CHARACTERS:
        raise DescriptionError(f"{path}: has more than {_MOST_CHARACTERS:,} characters: name a YAML file of {room}")
    return _parsed(text, str(path), room)


def _parsed(text: str, where: str, room: str) -> Entries:
    """``room:`` in it has the descriptions by name; ``defaults:`` what all of them have that do not say otherwise."""
    try:
        document = yaml.safe_load(text)
    except RecursionError:
        raise DescriptionError(f"{where}: is nested too deeply: correct it") from None
    except yaml.YAMLError as error:
        raise DescriptionError(f"{where}: is no YAML ({' '.join(str(error).split())}): correct it") from None
    if not isinstance(document, dict) or not isinstance(document.get(room), dict) or not document[room]:
        raise DescriptionError(f"{where}: has no {room}: write `{room}:`, and under it a name and what is said of it")
    unknown = [str(key) for key in document if key not in (room, "defaults")]
    if unknown:
        raise DescriptionError(f"{where}: {unknown[0]}: unknown key, {nearest(unknown[0], [room, 'defaults'])}")
    defaults = document.get("defaults") or {}
    for name, said in [("defaults", defaults), *((f"{room}.{name}", one) for name, one in document[room].items())]:
        if not isinstance(said, dict):
            raise DescriptionError(f"{where}: {name}: is {said!r}: write keys and values under it")
        if not isinstance(said.get("sources") or {}, dict):
            raise DescriptionError(f"{where}: {name}.sources: is {said['sources']!r}: write a source under each key")
    return {str(name): _merged(defaults, said) for name, said in document[room].items()}


def _merged(defaults: Mapping[str, Any], said: Mapping[str, Any]) -> Mapping[str, Any]:
    sources = {**(defaults.get("sources") or {}), **(said.get("sources") or {})}
    return {**defaults, **said, "sources": sources}


def described(kind: type[_Kind], name: str, said: Mapping[str, Any], where: str) -> _Kind:
    """The description of these values. Raises DescriptionError with the file and the path of the key that is wrong."""
    try:
        return kind.model_validate({**said, "name": name})
    except ValidationError as error:
        # A key that nobody reads is often the misspelled one that is missing.
        fault = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        keys = [str(key) for key in fault["loc"]]
        path = ".".join([name, *keys])
        if fault["type"] == "extra_forbidden":
            raise DescriptionError(f"{where}: {path}: unknown key, {nearest(keys[-1], _keys(kind, keys))}") from None
        message = fault["msg"].removeprefix("Value error, ")
        raise DescriptionError(f"{where}: {path}: {message[:1].lower()}{message[1:]}") from None


def _keys(kind: type[BaseModel], path: list[str]) -> list[str]:
    """The keys that there are where the last of ``path`` is not one."""
    for key in path[:-1]:
        annotation = kind.model_fields[key].annotation
        inner = [annotation, *getattr(annotation, "__args__", ())]
        kind = next(one for one in inner if isinstance(one, type) and issubclass(one, BaseModel))
    return list(kind.model_fields)
