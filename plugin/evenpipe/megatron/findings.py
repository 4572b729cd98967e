"""What became of the catalogue's symbols in one Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from evenpipe.megatron.catalogue import Item, Purpose

__all__ = ["TRAINING_PACKAGE", "Finding", "Findings", "State"]

TRAINING_PACKAGE = "megatron.training"
"""What scripts of Megatron-LM are made of; wheels of megatron-core before 0.17 do not have it."""


class State(Enum):
    """Whether a symbol is what EvenPipe was written against."""

    FITS = "fits"
    APPLIED = "applied"
    MISFIT = "does not fit"
    NOT_IMPORTABLE = "not importable here"
    ABSENT = "absent"


class Finding(NamedTuple):
    """`detail` is one line where something keeps the symbol from being used: what was found, expected, what to do."""

    item: Item
    state: State
    detail: str | None = None


@dataclass(frozen=True)
class Findings:
    """One Megatron: the folder that its packages lie in, its version and series where these are known.

    `problem` is one line where the version keeps everything else from being looked at, or from being used.
    """

    root: Path | None
    version: str | None
    series: str | None
    problem: str | None
    findings: tuple[Finding, ...]

    @property
    def supported(self) -> bool:
        """Whether EvenPipe can train with it; CPU mode, which GPU runs do not need, does not count."""
        return not self.problems(Purpose.TRAINING)

    def problems(self, purpose: Purpose) -> tuple[str, ...]:
        """The lines that say what keeps that from working."""
        lines = [self.problem, *(finding.detail for finding in self.findings if finding.item.purpose is purpose)]
        return tuple(dict.fromkeys(line for line in lines if line is not None))
