"""Schedules as data: actions and notation, specifications, passes, and the verifier. Pure Python."""

from evenpipe.schedule.actions import Action, Unit, parse
from evenpipe.schedule.bpipe import balance
from evenpipe.schedule.build import Programs, build, choose
from evenpipe.schedule.clock import Clock
from evenpipe.schedule.collector import without_cycle_collector
from evenpipe.schedule.errors import ScheduleError
from evenpipe.schedule.grid import format_grid
from evenpipe.schedule.kinds import (
    ACCEPT,
    BACKWARD,
    COMPUTE,
    DEPARTING,
    EVICT,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    LOAD,
    OWN_ENDS,
    RECEIVING,
    RETURN,
    SENDING,
    SWAP_IN,
    SWAP_OUT,
    UPDATE,
    WEIGHT_GRADIENT,
    ActionKind,
    Cost,
    Kind,
    LinkKind,
)
from evenpipe.schedule.known import find, names
from evenpipe.schedule.lazy import PerStage
from evenpipe.schedule.lower import Program, lower
from evenpipe.schedule.needs import check_offers, needs_of, offered
from evenpipe.schedule.order import Queues, strictest
from evenpipe.schedule.places import Place, Places, loop, vee
from evenpipe.schedule.schedule import Schedule
from evenpipe.schedule.spec import Drawing, Need, Size, Spec
from evenpipe.schedule.step import Step
from evenpipe.schedule.stream import Stream
from evenpipe.schedule.swaps import returns_beside, swapped_at_once, swapping, with_swaps
from evenpipe.schedule.table import Column
from evenpipe.schedule.topology import Gathering, Link, Message, links, partner
from evenpipe.schedule.torch_table import torch_csv
from evenpipe.schedule.verify import reordered, verify
from evenpipe.schedule.versions import required_version
from evenpipe.schedule.wiring import Disagreement, Wiring

__all__ = [
    "ACCEPT",
    "BACKWARD",
    "COMPUTE",
    "DEPARTING",
    "EVICT",
    "FORWARD",
    "INPUT_GRADIENT",
    "KINDS",
    "LOAD",
    "OWN_ENDS",
    "RECEIVING",
    "RETURN",
    "SENDING",
    "SWAP_IN",
    "SWAP_OUT",
    "UPDATE",
    "WEIGHT_GRADIENT",
    "Action",
    "ActionKind",
    "Clock",
    "Column",
    "Cost",
    "Disagreement",
    "Drawing",
    "Gathering",
    "Kind",
    "Link",
    "LinkKind",
    "Message",
    "Need",
    "PerStage",
    "Place",
    "Places",
    "Program",
    "Programs",
    "Queues",
    "Schedule",
    "ScheduleError",
    "Size",
    "Spec",
    "Step",
    "Stream",
    "Unit",
    "Wiring",
    "balance",
    "build",
    "check_offers",
    "choose",
    "find",
    "format_grid",
    "links",
    "loop",
    "lower",
    "names",
    "needs_of",
    "offered",
    "parse",
    "partner",
    "reordered",
    "required_version",
    "returns_beside",
    "strictest",
    "swapped_at_once",
    "swapping",
    "torch_csv",
    "vee",
    "verify",
    "with_swaps",
    "without_cycle_collector",
]
