"""The document ``evenpipe.simulation/1``: what was simulated, of what, and from which times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenpipe.schedule import Program
from evenpipe.simulate.costs import Costs
from evenpipe.simulate.result import Simulation

__all__ = ["simulation_document"]


def simulation_document(
    program: Program, costs: Costs, simulation: Simulation, unit_bytes: Sequence[Sequence[int]] | None = None
) -> dict[str, Any]:
    """``simulation`` of ``program``, with all that it takes to simulate it again.

    schedule: as `evenpipe schedule --out` writes it. wires: by kind of link, [latency_ms, transmit_ms, beside_ms].
    memory: of each stage, from when on it holds how much: [at_ms, live units, bytes].
    """
    return simulation.to_json() | {
        "schedule": str(program.schedule),
        "costs": {
            "forward_ms": costs.forward_ms,
            "backward_ms": costs.backward_ms,
            "weight_gradient_ms": costs.weight_gradient_ms,
            "wires": {kind: list(wire) for kind, wire in costs.wires.items()},
            "synchronous_transfers": costs.synchronous_transfers,
        },
        "unit_bytes": unit_bytes,
        "memory": [[list(point) for point in stage.memory] for stage in simulation.stages],
    }
