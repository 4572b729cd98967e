"""How far an iteration may be from its estimate."""

from __future__ import annotations

from typing import NamedTuple

from evenpipe.planner.descriptions import Cluster, Model
from evenpipe.planner.run import Run

__all__ = ["Uncertainty", "uncertainty_of"]


class Uncertainty(NamedTuple):
    low: float
    high: float
    meaning: str = ""


def uncertainty_of(model: Model, cluster: Cluster, run: Run) -> Uncertainty:
    return Uncertainty(-0.1, 0.1)
