"""Simulate: what a schedule takes and holds, from stage times and link speeds, before anything runs."""

from evenpipe.simulate.costs import Costs, SimulationError, Wire
from evenpipe.simulate.result import MemoryPoint, Simulation, Span, StageResult, simulation_document
from evenpipe.simulate.simulator import ManyCosts, simulate
from evenpipe.simulate.steady import period_ms

__all__ = [
    "Costs",
    "ManyCosts",
    "MemoryPoint",
    "Simulation",
    "SimulationError",
    "Span",
    "StageResult",
    "Wire",
    "period_ms",
    "simulate",
    "simulation_document",
]
