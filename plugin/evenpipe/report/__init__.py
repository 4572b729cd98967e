"""Report: schedules, timelines and memory as a text grid, a Perfetto trace, and (`report.picture`) a picture.

The picture is not imported here: it takes matplotlib, for which a training job should not wait.
"""

from evenpipe.report.files import check_writable, is_special, write_atomically
from evenpipe.report.grid import timeline_grid
from evenpipe.report.timeline import StageMemory, Timeline
from evenpipe.report.trace import perfetto_trace

__all__ = [
    "StageMemory",
    "Timeline",
    "check_writable",
    "is_special",
    "perfetto_trace",
    "timeline_grid",
    "write_atomically",
]
