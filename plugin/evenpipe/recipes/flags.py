"""Flags as a person writes them: a few words a line, values that are quoted, variables that are not."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

__all__ = ["Flag", "Group", "Line", "Variable", "lines", "word"]


def word(text: str) -> str:
    """One word of bash, also in an array, where shellcheck takes a comma for a mistake."""
    return f"'{text}'" if "," in text and shlex.quote(text) == text else shlex.quote(text)


class Variable(NamedTuple):
    """One that stands at the top of the file: its value may begin with a dash, which `--flag=value` allows."""

    name: str


Value: TypeAlias = "int | float | str | Variable | None"


class Flag(NamedTuple):
    """`--name value`; without a value, a switch."""

    name: str
    value: Value = None

    def __str__(self) -> str:
        if self.value is None:
            return f"--{self.name}"
        if isinstance(self.value, Variable):
            return f'--{self.name}="${self.value.name}"'
        text = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
        return f"--{self.name} {word(text)}"


Line: TypeAlias = Sequence[Flag]


@dataclass(frozen=True)
class Group:
    """An array of the script: its name, what a comment says of it, and its lines."""

    name: str
    comment: str
    lines: tuple[Line, ...]

    def __bool__(self) -> bool:
        return any(self.lines)


def lines(found: Iterable[Iterable[Flag | bool | None]]) -> tuple[Line, ...]:
    """Without flags that are not to be given, and without lines that are empty then."""
    return tuple(_filled(found))


def _filled(found: Iterable[Iterable[Flag | bool | None]]) -> Iterator[Line]:
    for line in found:
        kept = [flag for flag in line if isinstance(flag, Flag)]
        if kept:
            yield kept
