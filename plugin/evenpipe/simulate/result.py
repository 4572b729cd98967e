"""What a simulation finds: when every action ran, and what every stage did and held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from evenpipe.schedule import Action

__all__ = ["MemoryPoint", "Simulation", "Span", "StageResult"]


class Span(NamedTuple):
    """One action in time.

    A transfer (E, L, A, R) lasts from the start of its transmission to its arrival; an update takes no time.
    """

    action: Action
    start_ms: float
    end_ms: float


class MemoryPoint(NamedTuple):
    """From ``at_ms`` on, the stage holds ``live`` units, ``bytes`` in all (0 when no sizes were given)."""

    at_ms: float
    live: int
    bytes: int


@dataclass(frozen=True)
class StageResult:
    """One stage: time computing and not computing, peaks, and the memory curve in order of time.

    ``peak_live`` counts units (micro-batch x chunk), own plus accepted; ``peak_bytes`` is 0 when no sizes were given.
    """

    busy_ms: float
    idle_ms: float
    peak_live: int
    peak_bytes: int
    memory: tuple[MemoryPoint, ...]


@dataclass(frozen=True)
class Simulation:
    """One batch, or a stream of them, in time; ``timeline[s][i]`` is the span of the i-th action of stage s.

    ``bubble_fraction`` is the part of all stages' time in which they do not compute, in [0, 1].
    """

    makespan_ms: float
    bubble_fraction: float
    stages: tuple[StageResult, ...]
    timeline: tuple[tuple[Span, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """The document ``evenpipe.simulation/1``."""
        return {
            "format": "evenpipe.simulation/1",
            "makespan_ms": self.makespan_ms,
            "bubble_fraction": self.bubble_fraction,
            "stages": [
                {"busy_ms": stage.busy_ms, "idle_ms": stage.idle_ms, "peak_live": stage.peak_live}
                for stage in self.stages
            ],
            "timeline": [
                [{"action": str(span.action), "start_ms": span.start_ms, "end_ms": span.end_ms} for span in spans]
                for spans in self.timeline
            ],
        }
