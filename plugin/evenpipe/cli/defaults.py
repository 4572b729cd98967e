"""Defaults of options that a user keeps in a file: ``evenpipe.toml``, or ``[tool.evenpipe]`` of ``pyproject.toml``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evenpipe.cli.parser import COMMANDS, Parser, UsageError
from evenpipe.wording.nearest import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["FILE", "SHARED", "take_defaults"]

FILE: Final = "evenpipe.toml"
#: Keys outside of a command's table, and the commands that take them. `width` is no option: columns of the output.
SHARED: Final[Mapping[str, tuple[str, ...]]] = {
    "cluster": ("estimate", "fit", "plan", "recipe", "run"),
    "width": tuple(COMMANDS),
}
_LEAST_WIDTH: Final = 40


def take_defaults(parser: Parser, command: str, words: Sequence[str]) -> list[str]:
    """Give the options of a command the defaults of the nearest file, in this folder or one above it.

    Return a line that names the file, and one for each key of it that counts. What ``words`` have counts before them,
    as does an option that excludes one. Raises UsageError, which names the file.
    """
    if (command == "run" and "--estimate" not in words) or {"-h", "--help"}.intersection(words):
        return []  # a script's flags are its own; help must not fail
    found = _nearest_table(Path.cwd())
    if found is None:
        return [f"defaults: no {FILE} here or above"]
    path, table = found
    _check(path, table)
    if "width" in table:
        os.environ.setdefault("COLUMNS", str(_width(path, table["width"])))
    named = {key: value for key, value in table.items() if key != "width" and command in SHARED.get(key, ())}
    options = {name: action for action in parser.options() for name in action.option_strings}
    taken: dict[argparse.Action, str] = {}
    lines = [f"defaults: read {path}"]
    for where, values in (("", named), (f"[{command}] ", table.get(command, {}))):
        for key, value in values.items():
            source = f"{path}: {where}{key}"
            action = options.get(f"--{key}")
            if action is None or isinstance(action, argparse._HelpAction):
                known = [name[2:] for name in options if name.startswith("--") and name != "--help"]
                raise UsageError(f"{source}: unknown option of evenpipe {command}, {nearest(key, known)}")
            excluded = parser.excluded_by(action)
            if (other := next(filter(None, map(taken.get, excluded)), None)) is not None:
                raise UsageError(f"{source}: cannot be there beside {other}: keep one of them")
            if not any(_is_given(one, words) for one in (action, *excluded)):
                parser.take_default(action, value, source)
                lines.append(f"default: --{key} = {value!r} ({source})")
            taken[action] = key
    return lines


def _nearest_table(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the file and what it says; a pyproject.toml counts only where it has the table."""
    for one in (folder, *folder.parents):
        for name in (FILE, "pyproject.toml"):
            path = one / name
            if not path.is_file():
                continue
            try:
                document = tomllib.loads(path.read_text(encoding="utf-8"))
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror}") from error
            except ValueError as error:
                if name != FILE:
                    continue  # another tool's matter
                raise UsageError(f"{path}: is no TOML: {error}") from error
            table = document if name == FILE else document.get("tool", {}).get("evenpipe")
            if table is not None:
                return path, table
    return None


def _check(path: Path, table: Mapping[str, Any]) -> None:
    """Refuse keys that are neither shared nor a command's table."""
    for key, value in table.items():
        if key in COMMANDS:
            if not isinstance(value, dict):
                raise UsageError(f"{path}: {key}: is a command, so give a table: [{key}]")
        elif key not in SHARED:
            known = [*SHARED, *COMMANDS]
            raise UsageError(f"{path}: {key}: unknown key, {nearest(key, known)}; options go into [COMMAND]")


def _width(path: Path, value: object) -> int:
    if not isinstance(value, int) or value < _LEAST_WIDTH:
        raise UsageError(f"{path}: width: {value!r} is no number of columns from {_LEAST_WIDTH} on")
    return value


def _is_given(action: argparse.Action, words: Sequence[str]) -> bool:
    own = list(words)[: list(words).index("--")] if "--" in words else words
    return any(word.partition("=")[0] in action.option_strings for word in own)
