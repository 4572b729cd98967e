"""What every source of times gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from evenpipe.partition.counting import Work
from evenpipe.partition.trace import Graph

__all__ = ["NodeTimes", "TimeSource"]


class NodeTimes(NamedTuple):
    """How long one node takes for one micro-batch, in milliseconds."""

    forward_ms: float
    backward_ms: float


class TimeSource(Protocol):
    """Says how long nodes take on one device."""

    @property
    def name(self) -> str:
        """How it knows: "roofline", "measured"."""

    @property
    def device(self) -> str:
        """Which device the times are of."""

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda": whose kernels it stands for."""

    def times(
        self, graph: Graph, works: Sequence[Work], precision: str, progress: Callable[[int, int], None]
    ) -> tuple[NodeTimes, ...]:
        """The times of the graph's nodes, whose work was counted already."""
