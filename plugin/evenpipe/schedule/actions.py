"""The actions a stage carries out, and the one notation for them (``parse(str(a)) == a``)."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, cast

__all__ = [
    "ACCEPT",
    "ARRIVING",
    "BACKWARD",
    "COMPUTE",
    "DEPARTING",
    "EVICT",
    "FORWARD",
    "LOAD",
    "RETURN",
    "UPDATE",
    "Action",
    "Kind",
    "Unit",
    "parse",
]

Kind = Literal["F", "B", "E", "L", "A", "R", "U"]

# saved[u] = autograd(input[u]);  output -> next stage
FORWARD: Final = "F"
# gradient -> previous stage;  del saved[u]
BACKWARD: Final = "B"
# At the evictor: partner <- saved[u];  del saved[u] once it is there.
EVICT: Final = "E"
# At the evictor: saved[u] <- partner, before B of the same unit.
LOAD: Final = "L"
# At the acceptor, the other end of EVICT: pool[u] <- evictor.
ACCEPT: Final = "A"
# At the acceptor, the other end of LOAD: evictor <- pool[u];  free pool[u] once it is there.
RETURN: Final = "R"
# weights[t + 1] = optimizer(weights[t], gradient of batch t), submitted at the end of batch t, is finished here; the
# number is the batch's. Schedules that flush leave the step to the training loop, and have none.
UPDATE: Final = "U"

COMPUTE: Final = frozenset((FORWARD, BACKWARD))
#: Transfers after which a unit is live here, from their start on.
ARRIVING: Final = frozenset((LOAD, ACCEPT))
#: Transfers after which a unit is no longer live here, from their completion on.
DEPARTING: Final = frozenset((EVICT, RETURN))


class Unit(NamedTuple):
    """What is saved, evicted and counted: one micro-batch in one model chunk."""

    micro_batch: int
    chunk: int = 0


class Action(NamedTuple):
    """One thing a stage does. ``evictor`` names the stage that a unit belongs to, for ACCEPT and RETURN only.

    Of an UPDATE, ``micro_batch`` is the number of the batch.
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


_NOTATION = re.compile(
    r"([FBEL])(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?"
    r"|([AR])(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?@(0|[1-9][0-9]*)"
    r"|(U)(0|[1-9][0-9]*)"
)


def parse(text: str) -> Action:
    """The action that ``text`` denotes, e.g. ``F3``, ``B3.1`` (model chunk 1), ``A3@0`` (accepted from stage 0).

    Raises ``ValueError`` for anything else.
    """
    match = _NOTATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no action: expected F3, B3.1, E3, L3, A3@0, R3@0 or U3")
    own, own_mb, own_chunk, guest, guest_mb, guest_chunk, evictor, update, batch = match.groups()
    if own:
        return Action(cast(Kind, own), int(own_mb), int(own_chunk or 0))
    if update:
        return Action(UPDATE, int(batch))
    return Action(cast(Kind, guest), int(guest_mb), int(guest_chunk or 0), int(evictor))
