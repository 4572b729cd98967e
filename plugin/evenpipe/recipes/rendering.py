"""Templates, and the filters through which everything that a user has named goes into a file."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evenpipe.recipes.recipe import RecipeError

__all__ = ["macros", "render", "verbatim", "word"]


def word(text: str) -> str:
    """One word of bash, also in an array, where shellcheck takes a comma for a mistake."""
    return f"'{text}'" if "," in text and shlex.quote(text) == text else shlex.quote(text)


_TEMPLATES: Final = Path(__file__).parent / "templates"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: What a YAML block of lines cannot hold as it is: control characters, and breaks that YAML reads as its own.
_NOT_IN_A_BLOCK: Final = re.compile(
    r"[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
#: sbatch takes these words as they are.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+", re.ASCII)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    filters = {"sh": word, "line": _line, "directive": _directive, "yaml": _yaml, "block": _block, "cell": _cell}
    environment.filters.update({**filters, "flags": _flags, "when": lambda text, holds: text if holds else ""})
    return environment


def render(template: str, **values: Any) -> str:
    """Return the text of a file."""
    return _environment().get_template(f"{template}.j2").render(values)


def macros(template: str) -> Any:
    """Return the macros of a template, as functions."""
    return _environment().get_template(f"{template}.j2").module


def verbatim(name: str) -> str:
    """Return a file that is the same in every recipe."""
    return (_TEMPLATES / f"{name}.j2").read_text(encoding="utf-8")


def _flags(text: str) -> str:
    """Return the lines of an array of flags, without those that are empty."""
    return "\n".join(f"    {' '.join(line.split())}" for line in text.splitlines() if line.strip())


def _line(text: str) -> str:
    """Return what stays in its line, in a comment."""
    return _CONTROL.sub(" ", text)


def _cell(text: str) -> str:
    """In Markdown: one line, nothing of which is markup."""
    return re.sub(r"([\\`*_\[\]<>|#$~])", r"\\\1", _line(text))


def _directive(value: object) -> str:
    """Return the value of an option behind #SBATCH: sbatch reads quotes and backslashes, and lines end it."""
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    if _CONTROL.search(text):
        raise RecipeError(f"{text!r}: a line of #SBATCH cannot have control characters: choose another name")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _yaml(text: str) -> str:
    """Return a scalar on one line."""
    return str(yaml.safe_dump(text, default_style='"', allow_unicode=True, width=float("inf"))).rstrip("\n")


def _block(text: str, indent: int) -> str:
    """Return lines as they are, where YAML can hold them."""
    lines = text.removesuffix("\n").split("\n")
    if _NOT_IN_A_BLOCK.search(text) or not text.endswith("\n") or text.endswith("\n\n") or text.startswith((" ", "\n")):
        return _yaml(text)
    return "|\n" + "\n".join(" " * indent + line if line else "" for line in lines)
