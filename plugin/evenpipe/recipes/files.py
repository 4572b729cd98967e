"""A recipe's files: written together or not at all, and never over what somebody has edited."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from evenpipe.recipes.errors import RecipeError

__all__ = ["write_files"]


def write_files(folder: Path, files: Mapping[str, str], force: bool = False) -> None:
    """Put texts at their names in a folder, which is made. Scripts can be run.

    All are written beside it first; then each takes its name at once, so that a reader sees an old file or a new one,
    never a part. Raises RecipeError, and leaves everything as it was, where one is there already and ``force`` is not
    given, and OSError where they cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"--out {folder}: is a file: name a folder")
    there = [name for name in files if os.path.lexists(folder / name)]
    if there and not force:
        raise RecipeError(f"--out {folder}: has {', '.join(there)}: name another folder, or write over it with --force")
    if others := [name for name in there if not (folder / name).is_file()]:
        raise RecipeError(f"--out {folder}: {', '.join(others)} is no regular file: name another folder")
    made = not folder.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".evenpipe-recipe-", dir=folder.parent))
    try:
        for name, text in files.items():
            path = beside / name
            with path.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            path.chmod(0o755 if text.startswith("#!") else 0o644)
        if made:
            beside.chmod(0o755)
            beside.rename(folder)
            return
        for name in files:
            (beside / name).replace(folder / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
