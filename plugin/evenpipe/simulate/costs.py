"""Costs of compute and communication: stage times and the wires between stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evenpipe.schedule import Cost, Link, LinkKind

__all__ = ["Costs", "SimulationError", "Wire", "costs_of_halves"]


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
    one chunk takes 1/v of it, so that schedules of one model can be compared.
    weight_gradient_ms: the part of backward_ms that weight gradients take, where a backward is split; half, if None.
    wires: the wire of every link of a kind ("forward", "backward", "evict", "load", "swap out", "swap in"); a kind left
    out is free.
    links: single links that differ from their kind.
    synchronous_transfers: an evictor waits for each of its evictions and loads before it goes on.

    Raises SimulationError when a time is negative or not finite, or when the two tuples differ in length.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    wires: Mapping[LinkKind, Wire] = field(default_factory=dict)
    links: Mapping[Link, Wire] = field(default_factory=dict)
    synchronous_transfers: bool = False
    weight_gradient_ms: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.forward_ms) != len(self.backward_ms):
            raise SimulationError(
                f"{len(self.forward_ms)} forward and {len(self.backward_ms)} backward times: give one of each a stage"
            )
        weights = self._weight_gradient_ms
        if len(weights) != len(self.backward_ms) or any(w > b for w, b in zip(weights, self.backward_ms, strict=True)):
            raise SimulationError("weight_gradient_ms: give one a stage, none longer than the backward it is part of")
        named = {"forward_ms": self.forward_ms, "backward_ms": self.backward_ms, "weight_gradient_ms": weights}
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

    def of(self, stage: int) -> Mapping[Cost, float]:
        """Return the time of each kind of compute on a stage, all its chunks together."""
        return costs_of_halves(self.forward_ms[stage], self.backward_ms[stage], self._weight_gradient_ms[stage])

    def wire(self, link: Link) -> Wire:
        """Return the wire of one link: its own, or that of its kind, or a free one."""
        return self.links.get(link) or self.wires.get(link.kind) or Wire()


def costs_of_halves(forward_ms: Any, backward_ms: Any, weight_gradient_ms: Any) -> dict[Cost, Any]:
    """Return the time of each kind of compute: numbers, or arrays of them."""
    return {
        "forward": forward_ms,
        "backward": backward_ms,
        "input_gradient": backward_ms - weight_gradient_ms,
        "weight_gradient": weight_gradient_ms,
    }
