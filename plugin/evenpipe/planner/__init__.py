"""Planner: which group sizes and micro-batch sizes fit into memory, and how long a batch takes. Pure Python."""

from evenpipe.planner.candidates import PlanError, candidates, divisors
from evenpipe.planner.estimate import StageTimes, estimate_ms
from evenpipe.planner.grouped import Candidate, GroupedSchedule
from evenpipe.planner.growth import Measured, growth, stage_memory, stage_times
from evenpipe.planner.memory import StageMemory, peak_bytes, saved_peaks, unit_bytes

__all__ = [
    "Candidate",
    "GroupedSchedule",
    "Measured",
    "PlanError",
    "StageMemory",
    "StageTimes",
    "candidates",
    "divisors",
    "estimate_ms",
    "growth",
    "peak_bytes",
    "saved_peaks",
    "stage_memory",
    "stage_times",
    "unit_bytes",
]
