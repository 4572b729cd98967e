"""The options that choose a schedule, and those that write its picture and trace: what several commands share."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evenpipe.cli.parser import Parser, UsageError, add_schedule
from evenpipe.cli.progress import progress
from evenpipe.cli.values import costs_file, group_size, output_file, picture_file, seconds, seed, whole, write
from evenpipe.cli.verbosity import say, warn
from evenpipe.order_search.costs import FORMAT, RunCosts
from evenpipe.report.files import write_atomically
from evenpipe.report.timeline import StageMemory, Timeline, perfetto_trace
from evenpipe.schedule import (
    SEARCHED,
    SWAP_OUT,
    Program,
    Programs,
    Queues,
    Schedule,
    ScheduleError,
    Size,
    Swaps,
    choose,
    names,
)
from evenpipe.settings.spelling import command_flag, in_flags
from evenpipe.simulate import Costs, Simulation, SimulationError

if TYPE_CHECKING:
    from evenpipe.order_search.search import Effort

__all__ = [
    "add_output_options",
    "add_schedule_options",
    "costs_from",
    "effort_from",
    "parts_from",
    "program_from",
    "title_of",
    "told",
    "write_reports",
    "write_simulated",
]


def add_schedule_options(parser: Parser) -> None:
    """``--schedule --stages --micro-batches --chunks --group-size --batches --bpipe``, for :func:`program_from`."""
    group = parser.add_argument_group("schedule")
    named = " | ".join((*names(), "file:PATH", f"{SEARCHED} (for --costs)"))
    add_schedule(group, metavar="NAME", help=named)
    group.add_argument("--stages", type=whole, metavar="P", help="pipeline stages")
    group.add_argument("--micro-batches", type=whole, metavar="M", help="micro-batches in a batch")
    group.add_argument(
        "--chunks", type=whole, default=1, metavar="V", help="model chunks a stage, where the schedule has several"
    )
    group.add_argument(
        "--group-size", type=group_size, default=1, metavar="K", help="micro-batches in a row, where it has groups"
    )
    group.add_argument(
        "--batches", type=whole, metavar="N", help="batches, where it does not flush between (default 3)"
    )
    group.add_argument("--bpipe", action="store_true", help="level the stages' memory by evicting to partner stages")
    group = parser.add_argument_group("times and memory of each part of the model")
    group.add_argument(
        "--costs", type=costs_file, metavar="COSTS.json", help=f"{FORMAT}: times and bytes of each part, caps of stages"
    )
    group.add_argument(
        "--seconds", type=seconds, metavar="S", help=f"{SEARCHED}: annealed for about so long (default 10)"
    )
    group.add_argument("--seed", type=seed, metavar="N", help=f"{SEARCHED}: the same finds the same order (default 0)")
    group.add_argument("--whole-backwards", action="store_true", help=f"{SEARCHED}: backwards not in two halves")


def add_output_options(parser: Parser) -> None:
    """``--json --picture --trace``, the last two for :func:`write_reports`."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    group.add_argument("--picture", type=picture_file, metavar="P.png", help="draw the timeline and peaks as a PNG")
    group.add_argument("--trace", type=output_file, metavar="T.json", help="write a trace for ui.perfetto.dev")


def program_from(arguments: Namespace, queues: Queues = "many", swaps: Swaps = ()) -> Program:
    """Return the verified program that the options ask for, on such devices; UsageError where there is none."""
    if arguments.schedule is None:
        raise UsageError(f"--schedule: which? Give one of {', '.join(names())}, {SEARCHED}, or file:PATH")
    try:
        if arguments.schedule == SEARCHED and swaps:
            raise UsageError(f"--schedule {SEARCHED}: is searched without swaps: leave them out")
        if arguments.schedule == SEARCHED:
            return _searched(arguments, queues)
        for option in ("seconds", "seed", "whole_backwards"):
            if getattr(arguments, option):
                flag = command_flag(option)
                raise UsageError(f"{flag}: is of --schedule {SEARCHED}: leave {flag} out")
        spec = choose(arguments.schedule)
        table = spec.table
        missing = [option for option in ("stages", "micro_batches") if getattr(arguments, option) is None]
        if missing and table is None:
            raise UsageError(f"missing {', '.join(map(command_flag, missing))}: only a table (file:PATH) has its own")
        for option in missing:
            setattr(arguments, option, getattr(table, option))
        # Three batches show the start, the steady state and the end of a stream.
        usual = table.batches if table is not None else 3 if "stream" in spec.needs else 1
        batches = arguments.batches if arguments.batches is not None else usual
        size = Size(arguments.stages, arguments.micro_batches, arguments.chunks, arguments.group_size, batches)
        return Programs(spec, arguments.bpipe, queues, swaps)(size)
    except (ScheduleError, SimulationError) as error:
        raise UsageError(in_flags(error)) from error


def _searched(arguments: Namespace, queues: Queues) -> Program:
    from evenpipe.simulate.searched import searched

    costs, sizes = parts_from(arguments, f"--schedule {SEARCHED}"), (arguments.stages, arguments.micro_batches)
    split = not arguments.whole_backwards
    effort = effort_from(arguments)
    with progress(arguments.command, f"searches; annealing takes about {effort.seconds:g} s of one core"):
        program = searched(costs, *sizes, effort, split=split, queues=queues, told=told).program
    if any(program.schedule.evictions):
        warn("searched: stages evict to their partners: a run by this table needs --bpipe")
    if SWAP_OUT in program.schedule.table.letters:
        warn("searched: stages swap to their hosts: a run by this table needs --evenpipe-swap 1")
    return program


def parts_from(arguments: Namespace, asked: str) -> RunCosts:
    """Return what --costs says to what is ``asked`` for; UsageError where sizes are missing, or there are too many."""
    if arguments.costs is None:
        raise UsageError(f"{asked}: for which times? Give --costs COSTS.json, a document {FORMAT}")
    for option in ("stages", "micro_batches"):
        given = getattr(arguments, option)
        if given is None or given < 1:
            flag = command_flag(option)
            raise UsageError(
                f"{flag}: how many? --costs does not say it" if given is None else f"{flag} {given}: must be at least 1"
            )
    for option, usual in (("chunks", 1), ("group_size", 1), ("batches", None), ("bpipe", False)):
        if getattr(arguments, option) != usual:
            flag = command_flag(option)
            raise UsageError(f"{flag}: {asked} goes by the parts and the placement of --costs: leave {flag} out")
    costs: RunCosts = arguments.costs
    return costs


def effort_from(arguments: Namespace) -> Effort:
    """Return how long to search."""
    from evenpipe.order_search.search import Effort

    return Effort(arguments.seconds or Effort().seconds, seed=arguments.seed or 0)


def told(line: str) -> None:
    """A line of a search's progress."""
    say(f"searched: {line}")


def costs_from(arguments: Namespace, schedule: Schedule) -> Costs | None:
    """Return what --costs says, if it is given; UsageError where the schedule has its parts elsewhere."""
    given = arguments.costs
    if given is None:
        return None
    try:
        costs = Costs.of_parts(given, schedule)
        if given.places(schedule.stages) != schedule.places:
            raise UsageError(
                f"--costs: its parts are placed {given.placement}, those of {schedule.name} otherwise: choose another "
                "schedule, or give the parts as this one places them"
            )
    except ScheduleError as error:
        raise UsageError(in_flags(error)) from error
    return costs


def title_of(schedule: Schedule, bpipe: bool) -> str:
    """Return what a picture of the schedule is called."""
    group = f", k={schedule.group_size}" if schedule.group_size > 1 else ""
    chunks = f", {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    name = f"{schedule.name} with BPipe" if bpipe else schedule.name
    stream = f" × {schedule.batches} batches" if schedule.batches > 1 else ""
    return f"{name}{group}, {schedule.stages} stages{chunks}, {schedule.micro_batches} micro-batches{stream}"


def write_reports(arguments: Namespace, timelines: Sequence[Timeline], peaks: StageMemory) -> None:
    """Write the picture of all timelines and the trace of the last, as asked for.

    UsageError where one cannot be written.
    """

    def draw(path: Path) -> None:
        from evenpipe.report.picture import draw_comparison

        draw_comparison(path, timelines, [peaks])

    write("--picture", arguments.picture, draw)
    write("--trace", arguments.trace, lambda path: write_atomically(path, json.dumps(perfetto_trace(timelines[-1]))))


def write_simulated(arguments: Namespace, simulation: Simulation, title: str, schedule: Schedule) -> None:
    """The same for a simulation of `schedule`, with the peak of every stage in live units."""
    peaks = StageMemory("peak of saved activations", "live units", tuple(s.peak_live for s in simulation.stages))
    of_batch = schedule.micro_batches if schedule.weight_versions > 1 else None
    write_reports(arguments, [Timeline.of(simulation, title, of_batch)], peaks)
