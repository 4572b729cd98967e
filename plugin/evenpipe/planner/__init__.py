"""Planner: which group sizes and micro-batch sizes fit into memory. Pure Python."""

from evenpipe.planner.candidates import Candidate, PlanError, candidates
from evenpipe.planner.memory import StageMemory, peak_bytes, unit_bytes

__all__ = ["Candidate", "PlanError", "StageMemory", "candidates", "peak_bytes", "unit_bytes"]
