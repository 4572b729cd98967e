"""What the tests of this room simulate: named schedules on equal or unequal stages."""

from __future__ import annotations

from typing import Any

from evenpipe.schedule import lower
from evenpipe.simulate import Costs, Simulation, Wire, simulate
from tests.schedules import build


def run(
    name: str,
    p: int,
    m: int,
    *,
    chunks: int = 1,
    bpipe: bool = False,
    batches: int = 1,
    group_size: int = 1,
    forward: float | tuple[float, ...] = 1.0,
    backward: float | tuple[float, ...] = 2.0,
    link: Wire | None = None,
    transfer: Wire | None = None,
    synchronous: bool = False,
    **more: Any,
) -> Simulation:
    """The simulation of one schedule; one time means the same on every stage, no wire means free communication."""
    link, transfer = link or Wire(), transfer or Wire()
    costs = Costs(
        forward_ms=forward if isinstance(forward, tuple) else (forward,) * p,
        backward_ms=backward if isinstance(backward, tuple) else (backward,) * p,
        wires={"forward": link, "backward": link, "evict": transfer, "load": transfer},
        synchronous_transfers=synchronous,
    )
    schedule = build(name, p, m, chunks, bpipe=bpipe, batches=batches, group_size=group_size)
    return simulate(lower(schedule), costs, **more)
