"""Which commit is measured."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["commit"]

#: What a run writes itself: it changes nothing of what is measured next.
_WRITTEN: Final = ("README.md", "docs", "benchmarks/results")


def commit() -> str:
    """As git names it, with -dirty where something else than results and pages is not committed; "" without git."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    besides = (f":(exclude){path}" for path in _WRITTEN)
    with suppress(OSError, subprocess.CalledProcessError):
        name = _said(*git, "describe", "--always")
        changed = _said(*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *besides)
        return f"{name}-dirty" if changed else name
    return ""


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
