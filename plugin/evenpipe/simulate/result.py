"""The result of a simulation: when every action ran, what every stage did and held; and the document of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from evenpipe.schedule import Action, Column, Lazy, Program
from evenpipe.simulate.costs import Costs

__all__ = [
    "MemoryCurve",
    "MemoryPoint",
    "Simulation",
    "Span",
    "StageResult",
    "UnitChange",
    "simulation_document",
]


#: By how much a change of a unit changes how many are live.
_LIVE: Final = np.array([1, -1, 0, -1], np.int32)


class Span(NamedTuple):
    """One action in time.

    A transfer (E, L, A, R) lasts from the start of its transmission to its arrival; an update takes no time.
    """

    action: Action
    start_ms: float
    end_ms: float

    def to_json(self) -> dict[str, Any]:
        """As documents have it; the notation names micro-batch and chunk."""
        return {"action": str(self.action), "start_ms": self.start_ms, "end_ms": self.end_ms}


class MemoryPoint(NamedTuple):
    """From ``at_ms`` on, the stage holds ``live`` units, ``bytes`` in all (0 when no sizes were given)."""

    at_ms: float
    live: int
    bytes: int


class UnitChange(IntEnum):
    """A change of what a stage holds of a unit: all is saved, all is freed, or first a part and then the rest."""

    COMES = 0
    GOES = 1
    #: Its input gradient ends, which leaves what the weight gradient needs.
    HALVES = 2
    #: Its weight gradient ends.
    ENDS = 3


class MemoryCurve:
    """A stage's memory in order of time, a column for each field; ``bytes`` is None when no sizes are given.

    ``at_ms``, ``changes``, ``owners``, ``chunks``: of each change of a unit, in order of time: when, how, the stage
    that the unit belongs to, and its chunk. ``unit_bytes[s][c]`` is what a unit of chunk c weighs that belongs to stage
    s, and ``left_bytes[s][c]`` what it weighs from the end of its input gradient on; as much, if not given.
    """

    def __init__(
        self,
        at_ms: Column,
        changes: Column,
        owners: Column,
        chunks: Column,
        unit_bytes: Sequence[Sequence[int]] | None,
        left_bytes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.at_ms, self._changes, self._owners, self._chunks = at_ms, changes, owners, chunks
        self._unit_bytes = unit_bytes
        self._left_bytes = unit_bytes if left_bytes is None else left_bytes

    @cached_property
    def live(self) -> Column:
        return np.cumsum(_LIVE[self._changes])

    @cached_property
    def bytes(self) -> Column | None:
        if self._unit_bytes is None or self._left_bytes is None:
            return None
        saved, left = np.array(self._unit_bytes), np.array(self._left_bytes)
        by = np.stack([saved, -saved, left - saved, -left])  # as `UnitChange` counts
        return np.cumsum(by[self._changes, self._owners, self._chunks])

    @property
    def points(self) -> Sequence[MemoryPoint]:
        """All points, made when they are asked for."""
        return Lazy(len(self._changes), self._point)

    def _point(self, at: int) -> MemoryPoint:
        return MemoryPoint(float(self.at_ms[at]), int(self.live[at]), 0 if self.bytes is None else int(self.bytes[at]))


@dataclass(frozen=True)
class StageResult:
    """One stage: time computing and not computing, peaks, and the memory curve in order of time.

    ``peak_live`` counts units (micro-batch x chunk), own plus accepted; ``peak_bytes`` is 0 when no sizes were given.
    """

    busy_ms: float
    idle_ms: float
    peak_live: int
    peak_bytes: int
    memory: Sequence[MemoryPoint]


@dataclass(frozen=True)
class Simulation:
    """One batch, or a stream of them, in time; ``timeline[s][i]`` is the span of the i-th action of stage s.

    ``bubble_fraction`` is the part of all stages' time in which they do not compute, in [0, 1]. ``starts_ms``: when the
    actions of each stage start. ``arrives_ms``: by the action that takes it, when a message is complete.
    """

    makespan_ms: float
    bubble_fraction: float
    stages: tuple[StageResult, ...]
    timeline: Sequence[tuple[Span, ...]]
    starts_ms: Sequence[Sequence[float]]
    arrives_ms: Sequence[float]

    def to_json(self) -> dict[str, Any]:
        """Return the document ``evenpipe.simulation/1``."""
        return {
            "format": "evenpipe.simulation/1",
            "makespan_ms": self.makespan_ms,
            "bubble_fraction": self.bubble_fraction,
            "stages": [
                {"busy_ms": stage.busy_ms, "idle_ms": stage.idle_ms, "peak_live": stage.peak_live}
                for stage in self.stages
            ],
            "timeline": [[span.to_json() for span in spans] for spans in self.timeline],
        }


def simulation_document(
    program: Program,
    costs: Costs,
    simulation: Simulation,
    unit_bytes: Sequence[Sequence[int]] | None = None,
    left_bytes: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """``simulation`` of ``program`` as ``evenpipe.simulation/1`` has it, with all that it takes to simulate it again.

    schedule: as `evenpipe schedule --out` writes it. wires: by kind of link, [latency_ms, transmit_ms, beside_ms].
    memory: of each stage, from when on it holds how much: [at_ms, live units, bytes].
    """
    return simulation.to_json() | {
        "schedule": str(program.schedule),
        "costs": {
            "forward_ms": costs.forward_ms,
            "backward_ms": costs.backward_ms,
            "weight_gradient_ms": costs.weight_gradient_ms,
            "parts_ms": costs.parts_ms,
            "wires": {kind: list(wire) for kind, wire in costs.wires.items()},
            "synchronous_transfers": costs.synchronous_transfers,
        },
        "unit_bytes": unit_bytes,
        "left_bytes": left_bytes,
        "memory": [[list(point) for point in stage.memory] for stage in simulation.stages],
    }
