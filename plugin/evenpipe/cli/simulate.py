"""``evenpipe simulate``: show what a schedule would take and hold."""

from __future__ import annotations

import itertools
import json
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from evenpipe.cli.options import (
    add_output_options,
    add_schedule_options,
    costs_from,
    effort_from,
    parts_from,
    program_from,
    title_of,
    told,
    write_simulated,
)
from evenpipe.cli.parser import Commands, UsageError, add_command
from evenpipe.cli.progress import progress
from evenpipe.cli.shown import console_of, print_prose, print_table
from evenpipe.cli.values import bandwidth_gbps, duration_ms, durations_ms, mebibytes, write
from evenpipe.order_search.costs import held_bytes
from evenpipe.schedule import GAINING, OWN_ENDS, SWAP_OUT, WEIGHT_GRADIENT, Schedule, ScheduleError, most_whole
from evenpipe.settings.spelling import command_flag, in_flags
from evenpipe.simulate import Costs, Simulation, SimulationError, Wire, simulate, simulation_document
from evenpipe.simulate.device import PLAIN, SYNCHRONISED, Environment, run_on_devices

if TYPE_CHECKING:
    from evenpipe.simulate.front import Front, Point

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the sub-command."""
    document = (
        "--json prints a document evenpipe.simulation/1: makespan_ms, of all batches, bubble_fraction, each stage's "
        "busy_ms, idle_ms and peak_live, the timeline: when each action starts and ends, the memory: [at_ms, live "
        "units, bytes], and the schedule and costs of it all. on_devices_ms: the makespan in the environment that is "
        "asked for, if one is."
    )
    parser = add_command(commands, "simulate", epilog=document)
    add_schedule_options(parser)
    group = parser.add_argument_group("costs", "times of one micro-batch through one stage, all its chunks together")
    group.add_argument("--forward-ms", type=durations_ms, metavar="T[,T...]", help="one, or one a stage (default 1)")
    group.add_argument("--backward-ms", type=durations_ms, metavar="T[,T...]", help="one, or one a stage (default 2)")
    group.add_argument(
        "--weight-gradient-ms",
        type=durations_ms,
        metavar="T[,T...]",
        help="the part of --backward-ms that weight gradients take, where backwards are split (default half of it)",
    )
    group.add_argument("--link-ms", type=duration_ms, metavar="T", help="neighbour transfer (default 0)")
    group.add_argument("--transfer-ms", type=duration_ms, metavar="T", help="evict or load, with --bpipe (default 0)")
    group.add_argument(
        "--swap-mib",
        type=mebibytes,
        metavar="X",
        help="add swaps: X of each micro-batch goes to the host's memory after its forward, and comes back",
    )
    group.add_argument(
        "--host-gbps",
        type=bandwidth_gbps,
        metavar="B",
        help=f"of a stage's link to its host, each way (default {_HOST_GBPS})",
    )
    group.add_argument("--synchronous-transfers", action="store_true", help="evictors wait for evictions and loads")
    group = parser.add_argument_group("devices", "what GPUs would make of it: prints the makespan on a model of them")
    group.add_argument(
        "--one-queue", action="store_true", help="all of a stage passes one queue (CUDA_DEVICE_MAX_CONNECTIONS=1)"
    )
    said = "; ".join(f"{name}: {where}" for name, where in SYNCHRONISED.items())
    group.add_argument(
        "--synchronised", choices=SYNCHRONISED, default="never", help=f"where hosts wait for their device ({said})"
    )
    parser.add_argument(
        "--front",
        action="store_true",
        help="memory against time: every known schedule, and what is searched at several amounts of memory (--costs)",
    )
    add_output_options(parser)
    parser.set_defaults(run=_run)


_HOST_GBPS: Final = 50.0  # what is measured over PCI Express 5 x16 of an H100, rounded down (docs/gpu.md)

#: Options of times, which --costs has.
_TIMES = ("forward_ms", "backward_ms", "weight_gradient_ms", "link_ms", "transfer_ms", "synchronous_transfers")


def _run(arguments: Namespace) -> None:
    if arguments.front:
        _run_front(arguments)
        return
    environment = Environment(arguments.one_queue, arguments.synchronised)
    program = program_from(arguments, environment.queues, () if arguments.swap_mib is None else GAINING)
    schedule = program.schedule
    if arguments.swap_mib is None and arguments.host_gbps is not None:
        raise UsageError(f"--host-gbps {arguments.host_gbps:g}: nothing is swapped: add --swap-mib, or leave it out")
    if arguments.swap_mib is not None and environment != PLAIN:
        raise UsageError(
            "--swap-mib: the model of devices has no swaps in it: leave --one-queue and --synchronised out, or swaps"
        )
    if arguments.transfer_ms is not None and not any(schedule.evictions):
        raise UsageError(
            f"--transfer-ms {arguments.transfer_ms:g}: nothing is evicted or loaded: add --bpipe, or leave it out"
        )
    kinds = {action.kind for row in schedule.actions for action in row}
    if arguments.weight_gradient_ms is not None and WEIGHT_GRADIENT not in kinds:
        raise UsageError(f"--weight-gradient-ms: {schedule.name} does not split backwards: leave it out")
    try:
        costs = _with_swaps(arguments, _costs(arguments, schedule))
        simulation = simulate(program, costs)
        on_devices_ms = None if environment == PLAIN else run_on_devices(program, costs, environment)
    except SimulationError as error:
        raise UsageError(in_flags(error)) from error
    title = title_of(schedule, arguments.bpipe or any(schedule.evictions))
    write_simulated(arguments, simulation, title, schedule)
    if arguments.json:
        on_devices = {} if on_devices_ms is None else {"on_devices_ms": on_devices_ms}
        print(json.dumps(simulation_document(program, costs, simulation) | on_devices))
        return
    console = console_of()
    print_prose(console, title, "bold")
    _print(console, simulation, _bytes(arguments, schedule), _swaps(schedule, costs))
    if on_devices_ms is not None:
        console.print(
            f"on devices: makespan {on_devices_ms:,.6g} ms ({'one queue' if environment.one_queue else 'many queues'}, "
            f"synchronised {SYNCHRONISED[environment.synchronised]})",
        )


def _run_front(arguments: Namespace) -> None:
    from evenpipe.simulate.front import MEMORY_SHARES, front

    for option in ("schedule", "trace", "one_queue", *_TIMES):
        if getattr(arguments, option):
            flag = command_flag(option)
            raise UsageError(f"{flag}: --front is of all schedules, by --costs: leave {flag} out")
    costs = parts_from(arguments, "--front")
    try:
        split = not arguments.whole_backwards
        effort, fronts = effort_from(arguments), 1 if costs.peer_bytes_per_ms is None else 2
        with progress("simulate", "searches") as show:
            number = itertools.count()

            def begun(line: str) -> None:
                told(line)
                show("amounts of memory", next(number), fronts * len(MEMORY_SHARES))

            found = front(costs, arguments.stages, arguments.micro_batches, effort, split, begun)
    except ScheduleError as error:
        raise UsageError(in_flags(error)) from error
    title = f"{arguments.stages} stages, {arguments.micro_batches} micro-batches"

    def draw(path: Path) -> None:
        from evenpipe.report.figures import draw_fronts

        draw_fronts(path, {title: found})

    write("--picture", arguments.picture, draw)
    if arguments.json:
        points = {name: [one._asdict() for one in getattr(found, name)] for name in ("known", "searched", "evicting")}
        sizes = {"limit_ms": found.limit_ms, "base_bytes": found.base_bytes}
        print(json.dumps({"format": "evenpipe.front/1", **sizes, **points}))
        return
    console = console_of()
    console.print(f"{title}: memory against time", style="bold")
    _print_front(console, found)


def _print_front(console: Console, found: Front) -> None:
    def speed(point: Point | None) -> str:
        return "" if point is None else f"{point.batch_ms:,.6g}"

    caption = f"known: {', '.join(f'{one.name} {one.peak_bytes / found.base_bytes:.2f}' for one in found.known)}"
    evicting = {one.peak_bytes: one for one in found.evicting}
    heads = ["memory, 1F1B's = 1", "bytes", "best known", "ms", "searched, ms", "faster by"]
    heads += ["straight, evicting, ms"] * bool(evicting)
    rows = []
    for one in found.searched:
        best = found.best(one.peak_bytes)
        gain = "" if best is None else f"{best.batch_ms / one.batch_ms - 1:.1%}"
        memory = f"{one.peak_bytes / found.base_bytes:.3g}", f"{one.peak_bytes:,}"
        with_evictions = [speed(evicting.get(one.peak_bytes))] * bool(evicting)
        rows.append((*memory, "" if best is None else best.name, speed(best), speed(one), gain, *with_evictions))
    print_table(console, heads, rows, caption, optional=("bytes",))


def _costs(arguments: Namespace, schedule: Schedule) -> Costs:
    of_parts = costs_from(arguments, schedule)
    if of_parts is not None:
        for option in _TIMES:
            if getattr(arguments, option):
                flag = command_flag(option)
                raise UsageError(f"{flag}: --costs has all times: leave {flag} or --costs out")
        return of_parts
    link, transfer = Wire(transmit_ms=arguments.link_ms or 0.0), Wire(transmit_ms=arguments.transfer_ms or 0.0)
    weights = arguments.weight_gradient_ms
    if weights is not None:
        weights = _per_stage("--weight-gradient-ms", weights, schedule.stages)
    return Costs(
        forward_ms=_per_stage("--forward-ms", arguments.forward_ms or (1.0,), schedule.stages),
        backward_ms=_per_stage("--backward-ms", arguments.backward_ms or (2.0,), schedule.stages),
        wires={"forward": link, "backward": link, "evict": transfer, "load": transfer},
        synchronous_transfers=arguments.synchronous_transfers,
        weight_gradient_ms=weights,
    )


def _with_swaps(arguments: Namespace, costs: Costs) -> Costs:
    if arguments.swap_mib is None:
        return costs
    wire = Wire.of(arguments.swap_mib * 2**20, arguments.host_gbps or _HOST_GBPS)
    return replace(costs, wires={**costs.wires, "swap out": wire, "swap in": wire}, awaited_swaps=True)


def _swaps(schedule: Schedule, costs: Costs) -> list[tuple[str, str]] | None:
    """Each stage's micro-batches that are whole at once, and milliseconds that its link is busy each way."""
    kinds = schedule.table.letters
    if not kinds & OWN_ENDS:
        return None
    outs = (sum(action.kind == SWAP_OUT for action in row) for row in schedule.actions)
    busy_ms = [count * costs.wires.get("swap out", Wire()).transmit_ms for count in outs]
    return [(str(most_whole(row)), f"{busy:,.6g}") for row, busy in zip(schedule.actions, busy_ms, strict=True)]


def _bytes(arguments: Namespace, schedule: Schedule) -> list[str] | None:
    """Each stage's peak and its cap in bytes; None without --costs."""
    if arguments.costs is None:
        return None
    peaks = [max(held, default=0) for held in held_bytes(schedule, arguments.costs)]
    caps = arguments.costs.caps(schedule.stages)
    return [
        f"{peak:,}" + (f" of {cap:,}" if cap < math.inf else "") + (", too much" if peak > cap else "")
        for peak, cap in zip(peaks, caps, strict=True)
    ]


def _per_stage(option: str, times: tuple[float, ...], stages: int) -> tuple[float, ...]:
    if len(times) == 1:
        return times * stages
    if len(times) != stages:
        raise UsageError(f"{option}: {len(times)} times for {stages} stages; give one, or one for each stage")
    return times


def _print(
    console: Console, simulation: Simulation, held: list[str] | None, swaps: list[tuple[str, str]] | None
) -> None:
    caption = f"makespan {simulation.makespan_ms:,.6g} ms, bubble {simulation.bubble_fraction:.1%}"
    rows = []
    for number, stage in enumerate(simulation.stages):
        times = f"{stage.busy_ms:,.6g}", f"{stage.idle_ms:,.6g}"
        rows.append((str(number), *times, str(stage.peak_live), *(held[number : number + 1] if held else [])))
        rows[-1] += swaps[number] if swaps else ()
    heads = ("stage", "busy ms", "idle ms", "peak live", *["peak bytes"] * bool(held))
    print_table(console, (*heads, *("whole", "swaps ms") * bool(swaps)), rows, caption)
