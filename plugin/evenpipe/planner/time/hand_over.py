"""A hand-over between neighbouring stages: what is sent, and who waits for it."""

from __future__ import annotations

from typing import Final, NamedTuple

from evenpipe.planner.descriptions import Model
from evenpipe.planner.run import Run
from evenpipe.planner.time.links import Links

__all__ = ["HandOver", "hand_over", "message_bytes_of"]

_MS: Final = 1e3


class HandOver(NamedTuple):
    """Milliseconds. A message is on its way for the first two beside compute, or ``wait_ms`` in its sender's way."""

    latency_ms: float
    transmit_ms: float
    wait_ms: float


def message_bytes_of(model: Model, run: Run) -> float:
    """The activations of a micro-batch between two layers, of one tensor-parallel group."""
    return run.element_bytes * model.sequence // run.context * run.micro_batch * model.hidden


def hand_over(model: Model, run: Run, links: Links) -> HandOver:
    """Of ``run``'s schedule: where the framework blocks, the sender waits for all of it, and the link is free."""
    sent = message_bytes_of(model, run) / (run.tensor if run.sequence_parallel or run.divided_messages else 1)
    latency, transmit = (_MS * seconds for seconds in links.message(sent))
    if run.message_ms is not None:
        transmit, latency = run.message_ms, 0.0
    if run.spec.name not in (run.blocking or ()):
        return HandOver(latency, transmit, 0.0)
    return HandOver(0.0, 0.0, transmit + latency + (run.hand_over_us or 0.0) / _MS)
