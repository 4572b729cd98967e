"""How long a batch takes with one candidate: the pipeline length, from the simulator (Ada-Grouper §4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from evenpipe.schedule import Link, Program
from evenpipe.simulate import Costs, Wire, simulate

__all__ = ["StageTimes", "estimate_ms"]


class StageTimes(NamedTuple):
    """Per stage, milliseconds that it computes for one micro-batch of one size."""

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]


def estimate_ms(program: Program, times: StageTimes, message_ms: Mapping[Link, float]) -> float:
    """Milliseconds from the first forward of a batch to its last backward.

    `message_ms` is what one message takes on a link end to end, and occupies it; links that are left out, such as those
    of evictions, are taken as free.
    """
    wires = {link: Wire(transmit_ms=ms) for link, ms in message_ms.items()}
    return simulate(program, Costs(times.forward_ms, times.backward_ms, links=wires)).makespan_ms
