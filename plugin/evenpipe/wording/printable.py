"""Text of a file or a name, for a terminal."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return `text` with control characters, but for line ends, as escapes such as ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)
