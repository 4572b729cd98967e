"""Report: schedules, timelines and memory as a text grid, a picture, and a Perfetto trace."""

from evenpipe.report.files import check_writable, write_atomically
from evenpipe.report.grid import timeline_grid
from evenpipe.report.picture import draw_comparison
from evenpipe.report.timeline import StageMemory, Timeline
from evenpipe.report.trace import perfetto_trace

__all__ = [
    "StageMemory",
    "Timeline",
    "check_writable",
    "draw_comparison",
    "perfetto_trace",
    "timeline_grid",
    "write_atomically",
]
