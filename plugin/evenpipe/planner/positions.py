"""Where the parts of a pipeline are, and which of their forwards and backwards hand over to another stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from evenpipe.schedule import Places

__all__ = ["Positions", "positions_of"]


class Positions(NamedTuple):
    """Where the parts of a pipeline are, and what its stages hand over.

    at: the positions of each stage's parts. stages: of each position, its stage. sends, returns: of each stage, how
    many of its forwards and backwards hand over to another.
    """

    at: Sequence[Sequence[int]]
    stages: Sequence[int]
    sends: Sequence[int]
    returns: Sequence[int]


@cache
def positions_of(places: Places) -> Positions:
    """Of one kind of places the same, however many micro-batches go through them."""
    stages = [place.stage for place in places.order]
    at = [[places.position(stage, chunk) for chunk in range(places.chunks)] for stage in range(places.stages)]
    sends = [sum(n + 1 < len(stages) and stages[n + 1] != stage for n in own) for stage, own in enumerate(at)]
    returns = [sum(n > 0 and stages[n - 1] != stage for n in own) for stage, own in enumerate(at)]
    return Positions(at, stages, sends, returns)
