"""Schedules as data: actions and notation, builders, passes, and the verifier. Pure Python."""

from evenpipe.schedule.actions import (
    ACCEPT,
    BACKWARD,
    COMPUTE,
    DEPARTING,
    EVICT,
    FORWARD,
    LOAD,
    RETURN,
    UPDATE,
    Action,
    Kind,
    Unit,
    parse,
)
from evenpipe.schedule.bpipe import BALANCED_BOUNDS, balance
from evenpipe.schedule.build import SCHEDULES, build, named
from evenpipe.schedule.collector import without_cycle_collector
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.grid import format_grid
from evenpipe.schedule.lower import Program, Step, lower
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.stream import Stream
from evenpipe.schedule.topology import Link, LinkKind, Message, partner
from evenpipe.schedule.two_buffered import required_version
from evenpipe.schedule.verify import verify

__all__ = [
    "ACCEPT",
    "BACKWARD",
    "BALANCED_BOUNDS",
    "COMPUTE",
    "DEPARTING",
    "EVICT",
    "FORWARD",
    "LOAD",
    "RETURN",
    "SCHEDULES",
    "UPDATE",
    "Action",
    "Kind",
    "Link",
    "LinkKind",
    "Message",
    "Program",
    "Schedule",
    "ScheduleError",
    "Step",
    "Stream",
    "Unit",
    "balance",
    "build",
    "format_grid",
    "lower",
    "named",
    "parse",
    "partner",
    "required_version",
    "verify",
    "without_cycle_collector",
]
