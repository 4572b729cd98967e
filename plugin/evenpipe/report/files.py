"""Write a file as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["check_writable", "move_durably", "write_atomically", "write_durably"]


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Put ``content`` (text as UTF-8) at ``path``; a reader sees the old file or the new one, never a part.

    Raises OSError when the folder cannot be written; then nothing is left behind.
    """
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_durably(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Put what ``fill`` writes at ``path``: safe on disk as a whole when this returns, or not there.

    Its folder is made. Raises OSError, which names the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        move_durably(temporary, path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def move_durably(path: Path, to: Path) -> None:
    """Give a file or a folder another name, in a folder that is made; it is safe on disk when this returns."""
    to.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, to)
    for folder in {path.parent, to.parent}:
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """A name is safe only when the folder that has it is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: Path) -> str | None:
    """Why this process could not write a file at ``path``, and what to do, in one line; None if it could."""
    folder = path.resolve().parent
    if path.is_dir():
        return "is a folder: name a file in it"
    if not folder.is_dir():
        return f"there is no folder {folder}: make it, or name another"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"nothing can be written to the folder {folder} ({error.strerror}): name another"
