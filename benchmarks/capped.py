"""Measure plans under caps of memory on emulated stages, beside the simulated time of the same plan and of other ways.

The stages' compute and the copies sleep; plans, storages, memory, recomputation and waits are the runtime's. Each cap
is a part of what 1F1B's first stage holds. Other ways to save memory are simulated: BPipe, a fixed half to the host,
and full recomputation, each where it fits under the cap.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from emulated_host import EmulatedHostLink
from emulation import Accelerator, clock_ms, over_wires
from harness import Benchmark, Tick, positive, progress_bar, run_in_processes
from rich.table import Table
from torch import Tensor

from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.host_swaps import HostSwaps
from evenpipe.runtime.recomputed_layers import recomputing_layers
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import GAINING, LEVELS, Program, Programs, Size, build, links, loop
from evenpipe.schedule.swap_room import Saved, SwapRoom
from evenpipe.simulate import simulate
from evenpipe.simulate.under_cap import CappedStage, Layer, Way, costs_of, program_of
from evenpipe.tuner import swapping
from evenpipe.tuner.process_memory import Room
from evenpipe.tuner.searching import UNDER_WAY

# Long enough for every process to have left the broadcast of the start.
_START_DELAY_MS = 50.0
_BOUNDARY_BYTES = 4096
#: Batches of a plan: the one that measures, and the first that goes by it, which loads what recomputation needs.
_UNTIMED = 2


class Setting(NamedTuple):
    """`copy_ms`: of all that a micro-batch saves, one way; it saves `storages` of equal size, `nbytes` in all.

    `partner_ms`: the same of a message to the partner; 0 where stages send none. Each of a stage's `layers` saves and
    takes the same.
    """

    stages: int
    micro_batches: int
    repeats: int
    caps: tuple[float, ...]
    forward_ms: float
    backward_ms: float
    copy_ms: float
    partner_ms: float
    layers: int
    storages: int
    nbytes: int

    @property
    def size(self) -> Size:
        """Return the size of the schedule."""
        return Size(self.stages, self.micro_batches)

    @property
    def whole_bytes(self) -> int:
        """Return the most that 1F1B holds."""
        return self.stages * self.nbytes


class _Compute(torch.autograd.Function):
    """Sleeps both ways, and saves storages of its own that have the micro-batch's number."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, accelerator: Accelerator, setting: Setting) -> Tensor:
        ctx.accelerator, ctx.number, ctx.layers = accelerator, number[0].item(), setting.layers
        elements, count = setting.nbytes // setting.storages // 4, setting.storages // setting.layers
        ctx.save_for_backward(*(torch.full((elements,), ctx.number) for _ in range(count)))
        accelerator.compute(accelerator.forward_ms / setting.layers)
        return number.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if any(not saved[0] == saved[-1] == ctx.number for saved in ctx.saved_tensors):
            raise RuntimeError(f"micro-batch {ctx.number:.0f} got another's activations back")
        ctx.accelerator.compute(ctx.accelerator.backward_ms / ctx.layers)
        return gradient, None, None


class _Module(torch.nn.Module):
    def __init__(self, accelerator: Accelerator, setting: Setting) -> None:
        super().__init__()
        self._accelerator, self._setting = accelerator, setting

    def forward(self, number: Tensor) -> Tensor:
        return _Compute.apply(number, self._accelerator, self._setting)


def measure(rank: int, setting: Setting, tick: Tick) -> list[dict[str, Any]]:
    """In each process, for every cap: milliseconds of every batch, and each stage's way and peak."""
    cpu, elements = torch.device("cpu"), _BOUNDARY_BYTES // 4
    accelerator = Accelerator(setting.forward_ms, setting.backward_ms)
    joined = links(loop(setting.stages), setting.partner_ms > 0)
    connections = connect(range(setting.stages), joined, backend="gloo", device=cpu)
    wires = over_wires(connections, accelerator, setting.partner_ms)
    if setting.partner_ms:  # a message of any size takes so long on the emulated wires
        swapping.sending_gbps = lambda *ends: setting.nbytes / setting.partner_ms / 1e6
    host = EmulatedHostLink(accelerator, setting.copy_ms / setting.nbytes)
    plain, found = Programs("1f1b"), []
    layers = [_Module(accelerator, setting) for _ in range(setting.layers)]

    def batch_ms(executor: Executor, program: Program) -> float:
        """From the common start until the last stage is done."""
        stage = ModuleStage(
            [torch.nn.Sequential(*layers)],
            Edges.alike(torch.empty(elements)),
            first=lambda micro_batch: torch.full((elements,), float(micro_batch), requires_grad=True),
            loss=lambda _, output: output.sum(),
            loss_chunk=0 if rank == setting.stages - 1 else None,
        )
        start = torch.tensor(clock_ms() + _START_DELAY_MS, dtype=torch.float64)
        dist.broadcast(start, 0)
        accelerator.start(start.item())
        executor.counter.reset_peak()
        executor.run(program, stage)
        took = torch.tensor(clock_ms() - start.item(), dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        tick()
        return took.item()

    for cap in setting.caps:
        executor, decides = Executor(rank, wires, cpu), swapping.SwapLoop()
        executor.swaps = HostSwaps(executor.store, cpu, decides.limit, host)
        room = partial(Room, int(cap * setting.whole_bytes) + UNDER_WAY * _BOUNDARY_BYTES, 0)
        times, peak = [], 0
        for number in range(_UNTIMED + setting.repeats):
            program = decides.program(plain, setting.size)
            decides.begin(executor, [layers])
            (again,) = decides.layers(plain, setting.size)
            with recomputing_layers(layers[:again]):
                took = batch_ms(executor, program)
            decides.end(executor, setting.size, room, plain)
            if number >= _UNTIMED:
                times.append(took)
                peak = max(peak, executor.counter.peak_bytes)
        peaks: list[int] = [0] * setting.stages
        dist.all_gather_object(peaks, peak)
        ways = [way._asdict() for way in decides.ways(plain, setting.size)]
        found.append({"cap": cap, "ways": ways, "peak_bytes": peaks, "batches_ms": times})
    host.close()
    wires.close()
    return found


def stages_of(setting: Setting) -> list[CappedStage]:
    """Return what stages save and take, without limits. A partner is as fast as the host, if not told."""
    freed = setting.nbytes / setting.layers - _BOUNDARY_BYTES
    layers = [Layer(freed, setting.forward_ms / setting.layers)] * setting.layers
    saved, ms_a_byte = {0: Saved(setting.nbytes)}, setting.copy_ms / setting.nbytes
    times = [setting.forward_ms], [setting.backward_ms]
    partner_ms = (setting.partner_ms or setting.copy_ms) / setting.nbytes
    return [CappedStage(0.0, saved, [layers], *times, ms_a_byte, partner_ms)] * setting.stages


def other_ways(setting: Setting) -> dict[str, tuple[float, float]]:
    """Return, by name, the peak of the worst stage, of 1F1B's, and the simulated milliseconds."""
    stages = stages_of(setting)
    plain, bpipe = (build("1f1b", setting.size, bpipe) for bpipe in (False, True))
    half = build("1f1b", setting.size, swaps=GAINING)
    half_bytes = max(SwapRoom(row).peak_bytes(stages[0].saved, 0.5) for row in half.schedule.actions)
    again = stages[0].recomputing(setting.layers)
    again_bytes = SwapRoom(plain.schedule.actions[0]).peak_bytes(again.saved, 0.0) - again.limit_bytes

    def batch_ms(program: Program, way: Way) -> float:
        return simulate(program, costs_of(stages, (way,) * setting.stages)).makespan_ms

    nothing = Way("none", 0.0, 0)
    return {
        "BPipe": (max(bpipe.schedule.peak_live) / setting.stages, batch_ms(bpipe, nothing)),
        "half to the host": (half_bytes / setting.whole_bytes, batch_ms(half, Way(GAINING, 0.5, 0))),
        "recomputation": (again_bytes / setting.whole_bytes, batch_ms(plain, Way("none", 0.0, setting.layers))),
    }


def results_of(setting: Setting, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the document's entries: of each cap the plan, predicted and measured, and what else fits."""
    single, stages = other_ways(setting), stages_of(setting)
    none_ms = simulate(build("1f1b", setting.size), costs_of(stages, (Way("none", 0.0, 0),) * setting.stages))
    results = []
    for entry in measured:
        ways = tuple(Way(**way) for way in entry["ways"])
        program = program_of(Programs("1f1b"), setting.size, ways)
        predicted_ms = simulate(program, costs_of(stages, ways)).makespan_ms
        took = median(entry["batches_ms"])
        others = {name: ms for name, (peak, ms) in single.items() if peak <= 1.02 * entry["cap"]}
        times = {"none_ms": none_ms.makespan_ms, "predicted_ms": predicted_ms, "measured_ms": took}
        held = {"copy_ms": setting.copy_ms, "peak": max(entry["peak_bytes"]) / setting.whole_bytes}
        results.append({**entry, **held, **times, "off": took / predicted_ms - 1, "others_ms": others})
    return results


def plan_of(ways: list[dict[str, Any]]) -> str:
    """Return what a plan's stages do, for people: those in a row that do the same, once."""
    each = []
    for way in ways:
        swaps = f"{way['share']:.0%}{'*' * (way['level'] == LEVELS[-1])}" if way["share"] else ""
        again, partner = f"{way['layers']}r" if way["layers"] else "", f"{way['bound']}p" if way["bound"] else ""
        each.append(" ".join(filter(None, (swaps, partner, again))) or "-")
    return ", ".join(f"{count} × {what}" if (count := len([*same])) > 1 else what for what, same in groupby(each))


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    names = ("BPipe", "half to the host", "recomputation")
    shown = Table("copy ms", "cap", "peak", "plan, by stage", "predicted ms", "measured ms", "off", "× none", *names)
    for entry in results:
        times = [f"{entry[of]:,.0f}" for of in ("predicted_ms", "measured_ms")]
        ratio = entry["predicted_ms"] / entry["none_ms"]
        others = [f"{entry['others_ms'][name]:,.0f}" if name in entry["others_ms"] else "" for name in names]
        shown.add_row(
            *(f"{entry['copy_ms']:g}", f"{entry['cap']:g}", f"{entry['peak']:.3f}", plan_of(entry["ways"]), *times),
            *(f"{entry['off']:+.1%}", f"{ratio:.3f}", *others),
        )
    shown.caption = (
        "%: of each micro-batch swaps, *: and the stage waits for each copy; p: held at most, where the stage "
        "and its partner move micro-batches; r: layers recomputed. Other ways: simulated ms, where they fit"
    )
    return shown


def main() -> None:
    benchmark = Benchmark("capped", __doc__, repeats=3)
    add = benchmark.parser.add_argument
    add("--stages", type=positive, default=4, help="(default 4)")
    add("--micro-batches", type=positive, default=16, help="of a batch (default 16)")
    add("--layers", type=positive, choices=(1, 2, 4, 8, 16, 32), default=8, help="of a stage (default 8)")
    add("--caps", type=float, nargs="+", default=[0.75, 0.6, 0.45], help="of 1F1B's peak (default 0.75 0.6 0.45)")
    add("--forward-ms", type=float, default=40.0, help="(default 40)")
    add("--backward-ms", type=float, help="(default twice a forward)")
    copies = "of all that a micro-batch saves, one way (default half a forward, one, and two)"
    add("--copy-ms", type=float, nargs="+", help=copies)
    partners = "of a message to the partner with all that a micro-batch saves (default: stages send none)"
    add("--partner-ms", type=float, default=0.0, help=partners)
    arguments = benchmark.parser.parse_args()
    forward_ms = arguments.forward_ms
    setting = Setting(
        arguments.stages,
        arguments.micro_batches,
        arguments.repeats,
        tuple(arguments.caps),
        forward_ms,
        arguments.backward_ms or 2 * forward_ms,
        copy_ms=0.0,
        partner_ms=arguments.partner_ms,
        layers=arguments.layers,
        storages=32,
        nbytes=2**20,
    )
    copies_ms = arguments.copy_ms or [forward_ms / 2, forward_ms, 2 * forward_ms]
    settings = [setting._replace(copy_ms=copy_ms) for copy_ms in copies_ms]
    results: list[dict[str, Any]] = []
    with progress_bar("caps", len(settings) * len(setting.caps) * (_UNTIMED + setting.repeats)) as tick:
        for one in settings:
            results += results_of(one, run_in_processes(setting.stages, measure, one, tick=tick))
    benchmark.report({**setting._asdict(), "copy_ms": copies_ms}, results, table(results))


if __name__ == "__main__":
    main()
