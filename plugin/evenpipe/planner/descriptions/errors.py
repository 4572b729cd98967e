"""What goes wrong with a description: one line that names the file and the key."""

from __future__ import annotations

__all__ = ["DescriptionError"]


class DescriptionError(ValueError):
    """There is no such description, or it does not say what it must; the message is one line with the remedy."""
