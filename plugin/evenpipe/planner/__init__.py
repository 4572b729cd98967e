"""Planner: which group sizes and micro-batch sizes fit into memory, and how long a batch takes. Pure Python."""

from evenpipe.planner.candidates import Candidate, PlanError, candidates
from evenpipe.planner.estimate import StageTimes, estimate_ms
from evenpipe.planner.memory import StageMemory, peak_bytes, saved_peaks, unit_bytes

__all__ = [
    "Candidate",
    "PlanError",
    "StageMemory",
    "StageTimes",
    "candidates",
    "estimate_ms",
    "peak_bytes",
    "saved_peaks",
    "unit_bytes",
]
