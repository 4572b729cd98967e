"""The actions a stage carries out, and the one notation for them (``parse(str(a)) == a``)."""

from __future__ import annotations

import re
from typing import NamedTuple, cast

from evenpipe.schedule.kinds import KINDS, Kind

__all__ = ["Action", "Unit", "parse"]


class Unit(NamedTuple):
    """What is saved, evicted and counted: one micro-batch in one model chunk."""

    micro_batch: int
    chunk: int = 0


class Action(NamedTuple):
    """One thing a stage does. ``evictor`` names the stage that a unit belongs to, where that is the partner.

    Of an update, ``micro_batch`` is the number of the batch.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    evictor: int = -1

    @property
    def unit(self) -> Unit:
        return Unit(self.micro_batch, self.chunk)

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        evictor = f"@{self.evictor}" if self.evictor >= 0 else ""
        return f"{self.kind}{self.micro_batch}{chunk}{evictor}"


def _letters(*, guest: bool, of_batch: bool) -> str:
    return "".join(row.letter for row in KINDS.values() if (row.guest, row.of_batch) == (guest, of_batch))


_NUMBER = "(?:0|[1-9][0-9]*)"
_CHUNK = r"(?:\.(?P<c{0}>[1-9][0-9]*))?"
_NOTATION = re.compile(
    f"(?P<k0>[{_letters(guest=False, of_batch=False)}])(?P<n0>{_NUMBER}){_CHUNK.format(0)}"
    f"|(?P<k1>[{_letters(guest=True, of_batch=False)}])(?P<n1>{_NUMBER}){_CHUNK.format(1)}@(?P<e1>{_NUMBER})"
    f"|(?P<k2>[{_letters(guest=False, of_batch=True)}])(?P<n2>{_NUMBER})"
)


def parse(text: str) -> Action:
    """The action that ``text`` denotes, e.g. ``F3``, ``B3.1`` (model chunk 1), ``A3@0`` (accepted from stage 0).

    Raises ``ValueError`` for anything else.
    """
    match = _NOTATION.fullmatch(text)
    if match is None:
        shown = repr(text if len(text) <= 32 else f"{text[:32]}…")
        raise ValueError(f"{shown} is no action: expected F3, B3.1, D3, W3, E3, L3, A3@0, R3@0, O3, I3 or U3")
    found = {name[0]: value for name, value in match.groupdict().items() if value is not None}
    return Action(cast(Kind, found["k"]), int(found["n"]), int(found.get("c", 0)), int(found.get("e", -1)))
