"""One rank's part in the timeline of an iteration."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import torch.distributed as dist

from evenpipe.runtime.clock import Clock
from evenpipe.runtime.spans import SpanRecorder
from evenpipe.schedule import parse
from evenpipe.simulate import Span

__all__ = ["Place", "Recording", "Row"]

# Four processes on two busy cores left one barrier 1.3 ms apart, at worst 34 ms. The median over nine of them aligns
# their clocks to 0.2 ms, at worst 0.35 ms.
_BARRIERS = 9


class Place(NamedTuple):
    """Where a rank is in the grid of its job: rows are in `order`, pipeline by pipeline, then stage by stage."""

    order: tuple[int, ...]
    name: str


class Recording:
    """What this rank does from here on; made by all ranks, between two batches of theirs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._barriers = []
        for _ in range(_BARRIERS):
            dist.barrier()
            self._barriers.append(clock.mark())
        self.spans = SpanRecorder(clock)

    def row(self, place: Place) -> Row:
        """What it was."""
        last = self._barriers[-1]
        return Row(
            [*place.order, dist.get_rank()],
            f"{place.name} (rank {dist.get_rank()})",
            [self._clock.elapsed_ms(left, last) for left in self._barriers],
            [(str(action), round(start, 4), round(end, 4)) for action, start, end in self.spans.since(last)],
        )


class Row(NamedTuple):
    """One rank's part; all of it goes through JSON, and rows sort by their places.

    `barriers`: how long before it left the last of the opening barriers the rank had left each, in milliseconds;
    `spans`: (notation, start, end), in milliseconds after that.
    """

    order: list[int]
    name: str
    barriers: list[float]
    spans: list[tuple[str, float, float]]

    def timeline(self, first: Row) -> tuple[Span, ...]:
        """The spans in milliseconds after `first` left the last barrier.

        Two ranks have left a barrier at the same time, as far as anybody knows: the median over the barriers of how
        much later this rank did by its own count is how far that count is ahead.
        """
        ahead = median(mine - other for other, mine in zip(first.barriers, self.barriers, strict=True))
        return tuple(Span(parse(notation), start + ahead, end + ahead) for notation, start, end in self.spans)
