"""Write a file as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["check_writable", "write_atomically"]


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
