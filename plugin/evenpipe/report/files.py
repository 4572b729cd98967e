"""Write a file as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_atomically"]


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
