"""Places of the model's parts, and which stages talk: neighbours along it, BPipe's pairs, a stage and its host."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from evenpipe.schedule.actions import LinkKind, ScheduleError

__all__ = ["Gathering", "Link", "Message", "Place", "Places", "links", "loop", "parse_places", "partner", "vee"]


class Place(NamedTuple):
    """One part of the model: a model chunk of a stage."""

    stage: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.chunk}"


@dataclass(frozen=True)
class Places:
    """The parts of a model in the order in which a micro-batch passes through them; ``order[n]`` has position n.

    Every stage has the same number of chunks, and a stage's chunk c + 1 comes after its chunk c. Raises ScheduleError
    otherwise.
    """

    order: tuple[Place, ...]

    def __post_init__(self) -> None:
        chunks = len(self.order) // self.stages if self.order else 0
        wanted = [Place(*divmod(number, chunks)) for number in range(len(self.order) if chunks else 0)]
        along = sorted(self.order, key=lambda place: place.stage)  # stable: each stage's chunks as the model has them
        if not self.order or along != wanted:
            raise ScheduleError(
                f"places={','.join(map(str, self.order))}: each stage needs the same number of model chunks, in the "
                "order of the model"
            )

    @cached_property
    def stages(self) -> int:
        return 1 + max(place.stage for place in self.order)

    @property
    def chunks(self) -> int:
        """Model chunks a stage."""
        return len(self.order) // self.stages

    @property
    def first(self) -> Place:
        """The start of the model."""
        return self.order[0]

    @property
    def last(self) -> Place:
        """The end of the model, with the loss."""
        return self.order[-1]

    @cached_property
    def _positions(self) -> dict[Place, int]:
        return {place: position for position, place in enumerate(self.order)}

    def position(self, stage: int, chunk: int) -> int:
        """Return how many parts of the model come before this one."""
        return self._positions[Place(stage, chunk)]

    def neighbour(self, stage: int, chunk: int, direction: int) -> Place | None:
        """Return the part after (+1) or before (−1) this one; None at the model's end or start."""
        position = self.position(stage, chunk) + direction
        return self.order[position] if 0 <= position < len(self.order) else None

    def __str__(self) -> str:
        """``loop``, ``vee``, or the places themselves: ``0.0,1.0,0.1,1.1``."""
        named = (name for name, make in _NAMED.items() if make(self.stages, self.chunks) == self)
        return next(named, ",".join(map(str, self.order)))


def loop(stages: int, chunks: int = 1) -> Places:
    """Chunk by chunk, each from stage 0 to the last: 1F1B with one chunk, interleaved 1F1B with more."""
    return Places(tuple(Place(stage, chunk) for chunk in range(chunks) for stage in range(stages)))


def vee(stages: int, chunks: int = 2) -> Places:
    """Chunk 0 from stage 0 to the last, chunk 1 back again, and so on: the model's start and end are on stage 0."""
    ways = range(stages), range(stages - 1, -1, -1)
    return Places(tuple(Place(stage, chunk) for chunk in range(chunks) for stage in ways[chunk % 2]))


_NAMED: dict[str, Callable[[int, int], Places]] = {"loop": loop, "vee": vee}
_PLACE = re.compile(r"(\d+)\.(\d+)", re.ASCII)


def parse_places(text: str, stages: int, chunks: int) -> Places:
    """The inverse of ``str(places)``. Raises ScheduleError for what is no placement on so many stages and chunks."""
    if text in _NAMED:
        return _NAMED[text](stages, chunks)
    places = Places(tuple(_places_in(text)))
    if (places.stages, places.chunks) != (stages, chunks):
        raise ScheduleError(
            f"places={text}: are {places.stages} stages × {places.chunks} chunks, not {stages} × {chunks}"
        )
    return places


def _places_in(text: str) -> Iterable[Place]:
    for word in text.split(","):
        match = _PLACE.fullmatch(word)
        if match is None:
            raise ScheduleError(f"places={text}: expected {', '.join(_NAMED)}, or STAGE.CHUNK,STAGE.CHUNK,…")
        yield Place(int(match[1]), int(match[2]))


class Link(NamedTuple):
    """A directed first-in-first-out connection between two stages, or of one stage with itself."""

    kind: LinkKind
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind} {self.source}→{self.target}"


class Message(NamedTuple):
    """The content of a link for one unit; ``chunk`` is the model chunk as the receiver names it."""

    link: Link
    micro_batch: int
    chunk: int

    @property
    def is_local(self) -> bool:
        """Return whether the message is handed over, or copied, on one stage."""
        return self.link.source == self.link.target


class Gathering(NamedTuple):
    """The point at which all stages start to exchange what they know of a batch, whose step depends on it."""

    batch: int


def partner(stage: int, stages: int) -> int:
    """The other stage of the evictor-acceptor pair (BPipe §3.2); the middle stage of an odd pipeline is its own."""
    return stages - 1 - stage


def links(places: Places, pairs: bool = False) -> tuple[Link, ...]:
    """All links between two stages, in the one order in which they are opened: along the model, then by ``pairs``.

    Between neighbours there are both ways, whatever a schedule uses of them.
    """
    joined = [(before.stage, after.stage) for before, after in zip(places.order, places.order[1:], strict=False)]
    neighbours = dict.fromkeys(pair for pair in joined if pair[0] != pair[1])
    opened = [link for a, b in neighbours for link in (Link("forward", a, b), Link("backward", b, a))]
    for evictor in range(places.stages // 2 if pairs else 0):
        acceptor = partner(evictor, places.stages)
        opened += [Link("evict", evictor, acceptor), Link("load", acceptor, evictor)]
    return tuple(opened)
