"""What argparse says of a value, in plain words."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["in_plain_words"]

_KINDS: Final = {"int": "whole number", "float": "number"}


def in_plain_words(message: str) -> str:
    """Return a message of argparse's as `--x: 'a' is no whole number`, not `argument --x: invalid int value: 'a'`."""
    message = message.removeprefix("argument ")
    return re.sub(
        r"invalid (\S+) value: (.*)", lambda found: f"{found[2]} is no {_KINDS.get(found[1], 'value of it')}", message
    )
