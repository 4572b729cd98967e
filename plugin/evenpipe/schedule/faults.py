"""A fault of one step of a schedule, and how it is told: with the step marked in a grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.grid import format_grid
from evenpipe.schedule.schedule import Schedule

__all__ = ["Fault", "fault_of", "marked"]


class Fault(Exception):
    """What is wrong, and the step of one stage to point at."""

    def __init__(self, reason: str, stage: int, step: int) -> None:
        super().__init__(reason)
        self.mark = (stage, step)


def fault_of(schedule: Schedule, number: int, reason: str) -> Fault:
    """A fault of the action of that number."""
    stage = int(schedule.table.stage[number])
    step = number - schedule.table.of(stage).start
    return Fault(f"{schedule.actions[stage][step]} {reason}", stage, step)


@contextmanager
def marked(schedule: Schedule) -> Iterator[None]:
    """Makes a :class:`ScheduleError` of a fault."""
    try:
        yield
    except Fault as fault:
        stage, step = fault.mark
        grid = format_grid(schedule, fault.mark)
        raise ScheduleError(f"schedule {schedule.name}, stage {stage}, step {step}: {fault}\n{grid}") from None
