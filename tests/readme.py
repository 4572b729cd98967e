"""The commands of README.md and other pages, which tests run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

__all__ = ["ROOT", "commands", "commands_of"]

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
#: Text that stands for the reader's own words, as one word.
_YOURS = re.compile(r"<([\w. ]+)>")


def commands(page: str = "README.md") -> list[list[str]]:
    """The words of each command of a page; text in angle brackets is one word."""
    blocks = _BLOCK.findall((ROOT / page).read_text())
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(_YOURS.sub(lambda match: f"'{match[0]}'", line), comments=True) for line in lines]


def commands_of(kind: str) -> list[list[str]]:
    """Commands of a kind: "evenpipe" (needs nothing), "megatron" (a checkout), or what the command starts with."""
    return [words for words in commands() if kind_of(words) == kind]


def kind_of(words: list[str]) -> str:
    """Return whose test runs the command."""
    if "pretrain_gpt.py" in words:
        return "megatron"
    return "doctor" if "doctor" in words else words[0]
