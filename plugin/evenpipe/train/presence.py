"""Which processes of a run are alive, by what they leave in a folder common to them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["anybody_gone", "sign_in"]


def sign_in(folder: Path, rank: int) -> None:
    """This process is there."""
    (folder / f"{rank}.pid").write_text(str(os.getpid()))


def anybody_gone(folder: Path, processes: int) -> bool:
    """Whether one of the ranks below `processes` has ended, or was never there."""
    try:
        for rank in range(processes):
            os.kill(int((folder / f"{rank}.pid").read_text()), 0)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return True
    return False
