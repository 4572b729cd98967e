"""``evenpipe schedule``: show what every stage would do."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from evenpipe.cli.options import (
    add_output_options,
    add_schedule_options,
    costs_from,
    program_from,
    title_of,
    write_simulated,
)
from evenpipe.cli.parser import Commands, UsageError, add_command
from evenpipe.cli.shown import DRAWN_WIDTH, console_of, print_prose, print_table
from evenpipe.cli.values import output_file, write
from evenpipe.report.files import write_atomically
from evenpipe.report.grid import timeline_grid
from evenpipe.schedule import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Kind,
    Schedule,
    ScheduleError,
)
from evenpipe.simulate import Costs, Wire, simulate

__all__ = ["add_to", "torch_csv"]

EVENPIPE: Final = "evenpipe"
_DRAWN_AT_MOST: Final = 20_000  # actions; more are pages that nobody reads
#: What torch calls each kind of compute.
_LETTERS: Final[dict[Kind, str]] = {FORWARD: "F", BACKWARD: "B", INPUT_GRADIENT: "I", WEIGHT_GRADIENT: "W"}
# A schedule has no times of its own; it is drawn with the usual ratios: a backward takes two forwards, a transfer half.
_FORWARD_MS, _BACKWARD_MS, _TRANSFER_MS = 1.0, 2.0, 0.5


def torch_csv(schedule: Schedule) -> str:
    """One line a stage of the pipeline (torch's rank), such as ``0F0,0F1,4F0``: what torch calls stage is a position.

    A position is a part of the model, counted from its start; torch knows compute only. Raises :class:`ScheduleError`
    for a schedule with actions that torch has none for.
    """
    places = schedule.places
    lines = []
    for stage, row in enumerate(schedule.actions):
        words = []
        for action in row:
            if action.kind not in COMPUTE:
                raise ScheduleError(f"{action}: torch's tables have compute only: use another schedule, without bpipe")
            words.append(f"{places.position(stage, action.chunk)}{_LETTERS[action.kind]}{action.micro_batch}")
        lines.append(",".join(words))
    return "\n".join(lines) + "\n"


#: What --out writes.
FORMATS: Final[Mapping[str, Callable[[Schedule], str]]] = MappingProxyType({EVENPIPE: str, "torch-csv": torch_csv})


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    document = (
        "--json prints a document evenpipe.schedule/1: the actions of each stage (F3, B3: forward and backward of "
        "micro-batch 3; D3, W3: the latter's halves; E, L, A, R: transfers of bpipe; U0: the update of batch 0, 2bw "
        "only), the largest bound, each stage's bound, peak_live and evictions, and the parts of the model that are "
        "computed again."
    )
    parser = add_command(commands, "schedule", epilog=document)
    add_schedule_options(parser)
    parser.add_argument("--out", type=output_file, metavar="S.txt", help="write it: --schedule file:S.txt runs it")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=EVENPIPE,
        help="of --out: evenpipe, or torch-csv, as torch.distributed.pipelining reads it (default %(default)s)",
    )
    add_output_options(parser)
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> None:
    if arguments.format != EVENPIPE and arguments.out is None:
        raise UsageError(f"--format {arguments.format}: is of --out: give --out FILE, or leave --format out")
    program = program_from(arguments)
    schedule = program.schedule
    bpipe = arguments.bpipe or any(schedule.evictions)
    title = title_of(schedule, bpipe)
    write("--out", arguments.out, lambda path: write_atomically(path, _text(arguments.format, schedule)))
    given = costs_from(arguments, schedule)
    if arguments.picture or arguments.trace:
        transfer = Wire(transmit_ms=_TRANSFER_MS)
        costs = given or Costs(
            forward_ms=(_FORWARD_MS * schedule.chunks,) * schedule.stages,
            backward_ms=(_BACKWARD_MS * schedule.chunks,) * schedule.stages,
            wires={"evict": transfer, "load": transfer},
        )
        write_simulated(arguments, simulate(program, costs), title, schedule)
    if arguments.json:
        print(json.dumps(_document(schedule, bpipe)))
        return
    console = console_of()
    print_prose(console, title, "bold")
    actions = sum(map(len, schedule.actions))
    if actions <= _DRAWN_AT_MOST:
        console.print(timeline_grid(program, min(console.width, DRAWN_WIDTH)))
    else:
        console.print(f"{actions:,} actions are too many to draw; --out S.txt writes them")
    of_stages = ", ".join(map(str, schedule.bounds))
    caption = f"bounds: {of_stages} live" if schedule.bounds else f"bound: {schedule.bound} live on every stage"
    if schedule.recomputed:
        caption += f"; computed again: parts {', '.join(map(str, sorted(schedule.recomputed)))}"
    each = enumerate(zip(schedule.peak_live, schedule.evictions, strict=True))
    rows = [(str(stage), str(peak), str(evictions)) for stage, (peak, evictions) in each]
    print_table(console, ("stage", "peak live", "evictions"), rows, caption)


def _text(form: str, schedule: Schedule) -> str:
    try:
        return FORMATS[form](schedule)
    except ScheduleError as error:
        raise UsageError(f"--format {form}: {error}") from error


def _document(schedule: Schedule, bpipe: bool) -> dict[str, Any]:
    return {
        "format": "evenpipe.schedule/1",
        "name": schedule.name,
        "bpipe": bpipe,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "chunks": schedule.chunks,
        "group_size": schedule.group_size,
        "batches": schedule.batches,
        "actions": [[str(action) for action in row] for row in schedule.actions],
        "bound": schedule.bound,
        "bounds": [schedule.bound_of(stage) for stage in range(schedule.stages)],
        "peak_live": list(schedule.peak_live),
        "evictions": list(schedule.evictions),
        "recomputed": sorted(schedule.recomputed),
    }
