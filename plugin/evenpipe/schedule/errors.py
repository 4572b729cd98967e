"""What this room raises."""

from __future__ import annotations

__all__ = ["ScheduleError"]


class ScheduleError(ValueError):
    """A schedule that cannot be built, or that :func:`evenpipe.schedule.verify` refuses.

    The first line says what is wrong; the stage × step grid with the offending step marked may follow.
    """
