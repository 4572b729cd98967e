"""Costs of compute and communication: stage times and the wires between stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evenpipe.order_search.costs import Part, RunCosts
from evenpipe.schedule import BACKWARD, Cost, Link, LinkKind, Schedule

__all__ = [
    "Costs",
    "SimulationError",
    "Wire",
    "costs_of_chunks",
    "costs_of_part",
    "placed_parts",
    "saved_and_left_bytes",
    "whole_backward_bytes",
]


class SimulationError(ValueError):
    """A simulation that cannot be set up or cannot finish; the message is one line."""


class Wire(NamedTuple):
    """One directed link's speed: it is busy for ``transmit_ms`` a message, which arrives ``latency_ms`` after that.

    ``beside_ms``: of that, what nobody waits for, as it passes beside compute that it belongs to: so much earlier, if
    no earlier than the transmission starts, those who wait for the message go on.
    """

    latency_ms: float = 0.0
    transmit_ms: float = 0.0
    beside_ms: float = 0.0

    @classmethod
    def of(cls, message_bytes: float, gbps: float, latency_ms: float = 0.0) -> Wire:
        """Return the wire of messages of ``message_bytes`` bytes at ``gbps`` (10^9 bytes/s), which must be above 0."""
        if not gbps > 0:
            raise SimulationError(f"gbps={gbps}: a link needs a bandwidth above 0")
        return cls(latency_ms, message_bytes / (gbps * 1e6))


@dataclass(frozen=True)
class Costs:
    """How long everything takes, in milliseconds.

    forward_ms, backward_ms: per stage, for one micro-batch through the whole stage; with v model chunks, the action of
    one chunk takes 1/v of it, so that schedules of one model can be compared, or as much as ``parts_ms`` says.
    parts_ms: per stage and model chunk, the forward, the input gradient and the weight gradient, which add up to the
    stage's; for schedules with these chunks on these places only: :meth:`of_parts`.
    weight_gradient_ms: the part of backward_ms that weight gradients take, where a backward is split; half, if None.
    wires: the wire of every link of a kind ("forward", "backward", "evict", "load", "swap out", "swap in"); a kind left
    out is free.
    links: single links that differ from their kind.
    synchronous_transfers: an evictor waits for each of its evictions and loads before it goes on.
    awaited_swaps: a stage waits for swaps out until there is room for what comes, as
    :func:`evenpipe.schedule.awaited_swaps` has it. A plan's stages wait inside their forwards, whose times have it.

    Raises SimulationError when a time is negative or not finite, or when the two tuples differ in length.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    wires: Mapping[LinkKind, Wire] = field(default_factory=dict)
    links: Mapping[Link, Wire] = field(default_factory=dict)
    synchronous_transfers: bool = False
    awaited_swaps: bool = False
    weight_gradient_ms: tuple[float, ...] | None = None
    parts_ms: tuple[tuple[tuple[float, float, float], ...], ...] | None = None

    @classmethod
    def of_parts(cls, costs: RunCosts, schedule: Schedule) -> Costs:
        """Return a document's costs of a schedule. Raises ScheduleError where it is not for so many stages.

        Transfers to partners and hosts take what the largest of a stage's parts takes; nothing, if it does not say.
        """
        placed: list[list[tuple[float, float, float]]] = [[] for _ in range(schedule.stages)]
        parts = costs.recomputing(schedule.recomputed).parts
        moving_bytes = [0] * schedule.stages
        for place, part in zip(costs.places(schedule.stages).order, parts, strict=True):
            placed[place.stage].append((part.forward_ms, part.input_gradient_ms, part.weight_gradient_ms))
            moving_bytes[place.stage] = max(moving_bytes[place.stage], part.moving_bytes)
        of_stages = [tuple(map(sum, zip(*parts, strict=True))) for parts in placed]
        link, transfers = Wire(transmit_ms=costs.message_ms), dict[Link, Wire]()
        own = range(schedule.stages)
        ways: tuple[tuple[float | None, LinkKind, LinkKind, Sequence[int]], ...] = (
            (costs.peer_bytes_per_ms, "evict", "load", own[::-1][: schedule.stages // 2]),
            (costs.host_bytes_per_ms, "swap out", "swap in", own),
        )
        for speed, out, back, others in ways:
            for stage, other in enumerate(others if speed is not None else ()):
                transfer = Wire(transmit_ms=moving_bytes[stage] / (speed or 1.0))
                transfers |= {Link(out, stage, other): transfer, Link(back, other, stage): transfer}
        return cls(
            tuple(forward for forward, _, _ in of_stages),
            tuple(inputs + weights for _, inputs, weights in of_stages),
            {"forward": link, "backward": link},
            transfers,
            awaited_swaps=costs.host_bytes_per_ms is not None,
            weight_gradient_ms=tuple(weights for _, _, weights in of_stages),
            parts_ms=tuple(map(tuple, placed)),
        )

    def __post_init__(self) -> None:
        if len(self.forward_ms) != len(self.backward_ms):
            raise SimulationError(
                f"{len(self.forward_ms)} forward and {len(self.backward_ms)} backward times: give one of each a stage"
            )
        weights = self._weight_gradient_ms
        if len(weights) != len(self.backward_ms) or any(w > b for w, b in zip(weights, self.backward_ms, strict=True)):
            raise SimulationError("weight_gradient_ms: give one a stage, none longer than the backward it is part of")
        named = {"forward_ms": self.forward_ms, "backward_ms": self.backward_ms, "weight_gradient_ms": weights}
        named |= {"parts_ms": tuple(time for parts in self.parts_ms or () for part in parts for time in part)}
        named |= {f"wire {key}": wire for key, wire in (*self.wires.items(), *self.links.items())}
        for name, times in named.items():
            for time in times:
                if not (math.isfinite(time) and time >= 0):
                    raise SimulationError(f"{name}: {time} is no duration; give a finite number of at least 0")

    @property
    def _weight_gradient_ms(self) -> tuple[float, ...]:
        return (
            tuple(time / 2 for time in self.backward_ms) if self.weight_gradient_ms is None else self.weight_gradient_ms
        )

    def of(self, stage: int, chunks: int = 1) -> Sequence[Mapping[Cost, float]]:
        """Return, per model chunk of a stage, the time of each kind of compute.

        Raises SimulationError if there are other parts than chunks.
        """
        if self.parts_ms is None:
            whole = self.forward_ms[stage], self.backward_ms[stage], self._weight_gradient_ms[stage]
            return costs_of_chunks(*whole, chunks)
        parts = self.parts_ms[stage]
        if len(parts) != chunks:
            raise SimulationError(f"the costs have {len(parts)} parts on stage {stage}, the schedule has {chunks}")
        return [costs_of_part(forward, inputs + weights, weights) for forward, inputs, weights in parts]

    def wire(self, link: Link) -> Wire:
        """Return the wire of one link: its own, or that of its kind, or a free one."""
        return self.links.get(link) or self.wires.get(link.kind) or Wire()


def costs_of_chunks(forward_ms: Any, backward_ms: Any, weight_gradient_ms: Any, chunks: int) -> list[dict[Cost, Any]]:
    """Return the time of each kind of compute on each of a stage's equal chunks: numbers, or arrays of them."""
    whole = costs_of_part(forward_ms, backward_ms, weight_gradient_ms)
    return [{cost: time / chunks for cost, time in whole.items()}] * chunks


def costs_of_part(forward_ms: Any, backward_ms: Any, weight_gradient_ms: Any) -> dict[Cost, Any]:
    """Return the time of each kind of compute of one part."""
    return {
        "forward": forward_ms,
        "backward": backward_ms,
        "input_gradient": backward_ms - weight_gradient_ms,
        "weight_gradient": weight_gradient_ms,
    }


def placed_parts(costs: RunCosts, schedule: Schedule) -> list[list[Part]]:
    """Return a document's parts per stage and model chunk, as ``schedule`` places and recomputes them."""
    places, parts = schedule.places, costs.recomputing(schedule.recomputed).parts
    return [
        [parts[places.position(stage, chunk)] for chunk in range(schedule.chunks)] for stage in range(schedule.stages)
    ]


def saved_and_left_bytes(placed: Sequence[Sequence[Part]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return, per stage and chunk, the bytes that a unit saves, and those that its input gradient leaves."""
    saved = [[part.saved_bytes for part in row] for row in placed]
    left = [[part.saved_bytes - part.freed_by_input_gradient_bytes for part in row] for row in placed]
    return saved, left


def whole_backward_bytes(placed: Sequence[Sequence[Part]], schedule: Schedule) -> list[int]:
    """Return, per stage, what a whole backward holds for a moment beside what is saved, as between its two halves."""
    return [
        max(part.grown_bytes for part in row) if any(action.kind == BACKWARD for action in actions) else 0
        for row, actions in zip(placed, schedule.actions, strict=True)
    ]
