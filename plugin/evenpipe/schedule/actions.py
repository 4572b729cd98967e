"""Actions of a stage, their notation, and the one table of their kinds that everything else follows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, cast

__all__ = [
    "ACCEPT",
    "BACKWARD",
    "COMPUTE",
    "DEPARTING",
    "DONE",
    "EVICT",
    "FINISHING",
    "FORWARD",
    "INPUT_GRADIENT",
    "KINDS",
    "LOAD",
    "OWN_ENDS",
    "RECEIVING",
    "RETURN",
    "SENDING",
    "STATES",
    "SWAP_IN",
    "SWAP_OUT",
    "UNKNOWN",
    "UPDATE",
    "WEIGHT_GRADIENT",
    "Action",
    "ActionKind",
    "Cost",
    "Kind",
    "LinkKind",
    "ScheduleError",
    "State",
    "Unit",
    "parse",
]


class ScheduleError(ValueError):
    """A schedule that cannot be built, or that :func:`evenpipe.schedule.verify` refuses.

    The first line says what is wrong; the stage × step grid with the offending step marked may follow.
    """


Kind = Literal["F", "B", "D", "W", "E", "L", "A", "R", "O", "I", "U"]
LinkKind = Literal["forward", "backward", "evict", "load", "swap out", "swap in"]
Cost = Literal["forward", "backward", "input_gradient", "weight_gradient"]
State = Literal["unknown", "held", "evicted", "loaded", "out", "split", "accepted", "done"]

# saved[u] = autograd(input[u]);  output -> next position
FORWARD: Final = "F"
# gradient -> previous position;  del saved[u]
BACKWARD: Final = "B"
# The first half of B, which the previous position waits for: gradient of the input -> previous position.
INPUT_GRADIENT: Final = "D"
# The second half, for which nobody waits: gradients of the weights;  del saved[u].
WEIGHT_GRADIENT: Final = "W"
# At the evictor: partner <- saved[u];  del saved[u] once it is there. What is swapped stays on the own host.
EVICT: Final = "E"
# At the evictor: saved[u] <- partner, before B of the same unit; what is swapped comes back from the host with it.
LOAD: Final = "L"
# At the acceptor, the other end of EVICT: pool[u] <- evictor.
ACCEPT: Final = "A"
# At the acceptor, the other end of LOAD: evictor <- pool[u];  free pool[u] once it is there.
RETURN: Final = "R"
# host[u] <- selected storages of saved[u]; the rest stays, so that the unit counts as before.
SWAP_OUT: Final = "O"
# saved[u] <- host[u], before B of the same unit.
SWAP_IN: Final = "I"
# weights[t + 1] = optimizer(weights[t], gradient of batch t), submitted at the end of batch t, is finished here; the
# number is the batch's. Schedules that flush leave the step to the training loop, and have none.
UPDATE: Final = "U"

#: What a stage knows of a unit, and how that is said of it. An action of it takes it from one state to another.
STATES: Final[Mapping[State, str]] = MappingProxyType(
    {
        "unknown": "not forwarded yet",
        "held": "forwarded already",
        "evicted": "evicted",
        "loaded": "loaded already",
        "out": "swapped out",
        "split": "with its input gradient done",
        "accepted": "accepted already",
        "done": "done already",
    }
)
UNKNOWN: Final = "unknown"
DONE: Final = "done"


@dataclass(frozen=True)
class ActionKind:
    """One row of the table.

    takes, leaves: the states of a unit before and after, on the stage of the action.
    direction: the neighbour along the model that its result goes to, +1 (next), −1 (previous) or 0 (nobody); its
    input comes from the other side.
    held: how many more units the stage holds: +1 from its start; −1 from its end, of a transfer from its completion.
    cost: which of a stage's times it takes; None: it only starts something.
    ticks: what it takes on the logical clock: "In general, backward computation takes twice as long as forward
    computation" (BPipe, Appendix B).
    link: what a transfer moves on; sends, receives: which ends of the message this stage has.
    guest: the unit is of the stage behind the @, which is the partner. of_batch: the number is a batch's.
    """

    letter: Kind
    name: str
    colour: str
    takes: tuple[State, ...] = ()
    leaves: State = "unknown"
    direction: int = 0
    held: int = 0
    cost: Cost | None = None
    ticks: int = 0
    link: LinkKind | None = None
    sends: bool = False
    receives: bool = False
    guest: bool = False
    of_batch: bool = False


_OWN: tuple[State, ...] = ("held", "loaded")

# Compute in light colours that carry dark text; what leaves a stage in warm ones, what arrives in cool ones.
_ROWS = (
    ActionKind(FORWARD, "forward", "#a9c9ea", ("unknown",), "held", +1, +1, "forward", 1),
    ActionKind(BACKWARD, "backward", "#b9dbb2", _OWN, "done", -1, -1, "backward", 2),
    ActionKind(INPUT_GRADIENT, "input gradient", "#cfe5a8", _OWN, "split", -1, 0, "input_gradient", 1),
    ActionKind(WEIGHT_GRADIENT, "weight gradient", "#e3dcaf", ("split",), "done", 0, -1, "weight_gradient", 1),
    ActionKind(EVICT, "evict", "#d9772b", ("held", "out"), "evicted", held=-1, link="evict", sends=True),
    ActionKind(LOAD, "load", "#3b6fb6", ("evicted",), "loaded", held=+1, link="load", receives=True),
    ActionKind(ACCEPT, "accept", "#7b5ea7", ("unknown",), "accepted", held=+1, link="evict", receives=True, guest=True),
    ActionKind(RETURN, "return", "#d1495b", ("accepted",), "done", held=-1, link="load", sends=True, guest=True),
    ActionKind(SWAP_OUT, "swap out", "#b5651d", ("held",), "out", link="swap out", sends=True, receives=True),
    ActionKind(SWAP_IN, "swap in", "#2a7f9e", ("out",), "loaded", link="swap in", sends=True, receives=True),
    ActionKind(UPDATE, "update", "#3f7d58", of_batch=True),
)

#: Letter to row.
KINDS: Final[Mapping[Kind, ActionKind]] = MappingProxyType({row.letter: row for row in _ROWS})

COMPUTE: Final = frozenset(row.letter for row in _ROWS if row.cost is not None)
#: Compute after which a unit is no longer live, and its share of the gradients complete.
FINISHING: Final = frozenset(row.letter for row in _ROWS if row.cost is not None and row.held < 0)
#: Transfers after which a unit, or a part of it, is no longer here.
DEPARTING: Final = frozenset(row.letter for row in _ROWS if row.link and row.leaves not in ("loaded", "accepted"))
#: Transfers of which this stage has the sending end, and the receiving end; swaps have both.
SENDING: Final = frozenset(row.letter for row in _ROWS if row.sends)
RECEIVING: Final = frozenset(row.letter for row in _ROWS if row.receives)
#: Transfers whose both ends are on one stage.
OWN_ENDS: Final = SENDING & RECEIVING


class Unit(NamedTuple):
    """One micro-batch in one model chunk: it is saved, evicted and counted as a whole.

    Micro-batches count from 0 in a batch; those of a stream without flushes go on along it.
    """

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
    """Return the action that ``text`` denotes, e.g. ``F3``, ``B3.1`` (model chunk 1), ``A3@0`` (accepted from stage 0).

    Raises ``ValueError`` for anything else.
    """
    match = _NOTATION.fullmatch(text)
    if match is None:
        shown = repr(text if len(text) <= 32 else f"{text[:32]}…")
        raise ValueError(f"{shown} is no action: expected F3, B3.1, D3, W3, E3, L3, A3@0, R3@0, O3, I3 or U3")
    parts = {name[0]: value for name, value in match.groupdict().items() if value is not None}
    return Action(cast(Kind, parts["k"]), int(parts["n"]), int(parts.get("c", 0)), int(parts.get("e", -1)))
