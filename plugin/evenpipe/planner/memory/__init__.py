"""Memory: what every process of every stage holds, from measurements or from descriptions."""

from evenpipe.planner.memory.measured import (
    Measured,
    StageMemory,
    growth,
    peak_bytes,
    saved_peaks,
    stage_memory,
    stage_times,
    unit_bytes,
)

__all__ = [
    "Measured",
    "StageMemory",
    "growth",
    "peak_bytes",
    "saved_peaks",
    "stage_memory",
    "stage_times",
    "unit_bytes",
]
