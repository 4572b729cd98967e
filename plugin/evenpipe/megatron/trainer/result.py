"""What a training run found: losses, weights, times, and what every stage held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from evenpipe.simulate import Span

__all__ = ["RunResult", "StageMeasurement"]


class StageMeasurement(NamedTuple):
    """One stage over all iterations: peaks of own plus accepted saved activations, and bytes evicted per iteration.

    `peak_live` counts units (micro-batch × model chunk).
    """

    peak_live: int
    peak_saved_bytes: int
    evicted_bytes: int


@dataclass(frozen=True)
class RunResult:
    """`losses` are averages over micro-batches and data-parallel replicas, one per iteration, as is `iteration_ms`.

    `weights_sha256` covers every parameter of every stage and tensor-parallel rank. `unit_bytes[s][c]` is what one
    micro-batch saves in chunk c of stage s. `spans[s]` are the actions of stage s in the last iteration, in order of
    their start, in milliseconds from the first of all.
    """

    losses: tuple[float, ...]
    weights_sha256: str
    iteration_ms: tuple[float, ...]
    stages: tuple[StageMeasurement, ...]
    unit_bytes: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[Span, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """The document `evenpipe.run/1`."""
        return {
            "format": "evenpipe.run/1",
            "losses": list(self.losses),
            "losses_hex": [loss.hex() for loss in self.losses],
            "weights_sha256": self.weights_sha256,
            "iteration_ms": list(self.iteration_ms),
            "stages": [{"stage": stage, **measured._asdict()} for stage, measured in enumerate(self.stages)],
        }
