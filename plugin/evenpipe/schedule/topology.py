"""Which stage talks to which: neighbours along the model, BPipe's evictor-acceptor pairs, a stage and its host."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from evenpipe.schedule.actions import Action
from evenpipe.schedule.kinds import KINDS, LinkKind
from evenpipe.schedule.places import Places

__all__ = ["Gathering", "Link", "Message", "Routes", "links", "partner", "transfer"]


class Link(NamedTuple):
    """A directed first-in-first-out connection between two stages, or of one stage with itself."""

    kind: LinkKind
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind} {self.source}→{self.target}"


_link = cache(Link)  # links are few and named by every message
_DIRECTION = {letter: row.direction for letter, row in KINDS.items()}


class Message(NamedTuple):
    """What one link carries for one unit; ``chunk`` is the model chunk as the receiver names it."""

    link: Link
    micro_batch: int
    chunk: int

    @property
    def is_local(self) -> bool:
        """Whether it is handed over, or copied, on one stage."""
        return self.link.source == self.link.target


class Gathering(NamedTuple):
    """Where all stages start to exchange what they know of a batch, whose step depends on it."""

    batch: int


def partner(stage: int, stages: int) -> int:
    """The other stage of the evictor-acceptor pair (BPipe §3.2); the middle stage of an odd pipeline is its own."""
    return stages - 1 - stage


class Routes:
    """Who takes what from whom: the messages of compute actions, by where the model's parts are.

    A forward gives its result to the part after it, a backward or input gradient to the one before. Two consecutive
    parts on one stage have a message too, which is local: its link joins the stage with itself.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._ends: dict[tuple[int, int, int], tuple[Link | None, Link | None, int]] = {}
        for direction in sorted({row.direction for row in KINDS.values() if row.cost is not None}):
            for stage, chunk in places.order:
                self._ends[stage, chunk, direction] = self._of(stage, chunk, direction)

    def _of(self, stage: int, chunk: int, direction: int) -> tuple[Link | None, Link | None, int]:
        if not direction:
            return None, None, 0
        kind: LinkKind = "forward" if direction > 0 else "backward"
        before, after = (self.places.neighbour(stage, chunk, way) for way in (-direction, direction))
        source = None if before is None else _link(kind, before.stage, stage)
        target = None if after is None else _link(kind, stage, after.stage)
        return source, target, 0 if after is None else after.chunk

    def outgoing(self, action: Action, stage: int) -> Message | None:
        """What a compute action on ``stage`` gives its neighbour; None where nobody takes it."""
        _, link, chunk = self._ends[stage, action.chunk, _DIRECTION[action.kind]]
        return None if link is None else Message(link, action.micro_batch, chunk)

    def incoming(self, action: Action, stage: int) -> Message | None:
        """What a compute action on ``stage`` needs: the message whose sender's :meth:`outgoing` is the same."""
        link, _, _ = self._ends[stage, action.chunk, _DIRECTION[action.kind]]
        return None if link is None else Message(link, action.micro_batch, action.chunk)


def transfer(action: Action, stage: int, stages: int) -> Message:
    """What an action on ``stage`` moves to or from its partner, or its host."""
    row = KINDS[action.kind]
    assert row.link is not None, f"{action} moves nothing"
    other = action.evictor if row.guest else stage if row.sends and row.receives else partner(stage, stages)
    source, target = (stage, other) if row.sends else (other, stage)
    return Message(_link(row.link, source, target), action.micro_batch, action.chunk)


def links(places: Places, pairs: bool = False) -> tuple[Link, ...]:
    """All links between two stages, in the one order in which they are opened: along the model, then by ``pairs``.

    Between neighbours there are both ways, whatever a schedule uses of them.
    """
    joined = [(one.stage, other.stage) for one, other in zip(places.order, places.order[1:], strict=False)]
    neighbours = dict.fromkeys(pair for pair in joined if pair[0] != pair[1])
    found = [link for a, b in neighbours for link in (Link("forward", a, b), Link("backward", b, a))]
    for evictor in range(places.stages // 2 if pairs else 0):
        acceptor = partner(evictor, places.stages)
        found += [Link("evict", evictor, acceptor), Link("load", acceptor, evictor)]
    return tuple(found)
