"""One name and one colour for each kind of action, in the terminal and in pictures."""

from __future__ import annotations

from collections.abc import Mapping

from evenpipe.schedule import KINDS, Kind

__all__ = ["COLOURS", "NAMES"]

NAMES: Mapping[Kind, str] = {letter: row.name for letter, row in KINDS.items()}
COLOURS: Mapping[Kind, str] = {letter: row.colour for letter, row in KINDS.items()}
