"""Measure swaps under caps of memory on emulated stages, beside the simulated time of the same plan and of other ways.

The stages' compute and the copies sleep; plans, storages, memory and waits are the runtime's. Each cap is a part of
what 1F1B's first stage holds. Other ways to save memory are simulated: BPipe, a fixed half to the host, and full
recomputation, each where it fits under the cap.
"""

from __future__ import annotations

from functools import partial
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
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import GAINING, LevelsOfStages, Link, Program, Programs, Size, build, links, loop
from evenpipe.schedule.swap_room import Saved, SwapRoom
from evenpipe.simulate import Costs, Wire, simulate
from evenpipe.tuner.process_memory import Room
from evenpipe.tuner.searching import UNDER_WAY
from evenpipe.tuner.swapping import SwapLoop

# Long enough for every process to have left the broadcast of the start.
_START_DELAY_MS = 50.0
_BOUNDARY_BYTES = 4096


class Setting(NamedTuple):
    """`copy_ms`: of all that a micro-batch saves, one way; it saves `storages` of equal size, `nbytes` in all."""

    stages: int
    micro_batches: int
    repeats: int
    caps: tuple[float, ...]
    forward_ms: float
    backward_ms: float
    copy_ms: float
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
        ctx.accelerator, ctx.number = accelerator, number[0].item()
        elements = setting.nbytes // setting.storages // 4
        ctx.save_for_backward(*(torch.full((elements,), ctx.number) for _ in range(setting.storages)))
        accelerator.compute(accelerator.forward_ms)
        return number.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if any(not saved[0] == saved[-1] == ctx.number for saved in ctx.saved_tensors):
            raise RuntimeError(f"micro-batch {ctx.number:.0f} got another's activations back")
        ctx.accelerator.compute(ctx.accelerator.backward_ms)
        return gradient, None, None


class _Module(torch.nn.Module):
    def __init__(self, accelerator: Accelerator, setting: Setting) -> None:
        super().__init__()
        self._accelerator, self._setting = accelerator, setting

    def forward(self, number: Tensor) -> Tensor:
        return _Compute.apply(number, self._accelerator, self._setting)


def measure(rank: int, setting: Setting, tick: Tick) -> list[dict[str, Any]]:
    """In each process, for every cap: milliseconds of every batch, and each stage's level, share and peak."""
    cpu, elements = torch.device("cpu"), _BOUNDARY_BYTES // 4
    accelerator = Accelerator(setting.forward_ms, setting.backward_ms)
    connections = connect(range(setting.stages), links(loop(setting.stages)), backend="gloo", device=cpu)
    wires = over_wires(connections, accelerator, 0.0)
    host = EmulatedHostLink(accelerator, setting.copy_ms / setting.nbytes)
    plain, found = Programs("1f1b"), []

    def batch_ms(executor: Executor, program: Program) -> float:
        """From the common start until the last stage is done."""
        stage = ModuleStage(
            [_Module(accelerator, setting)],
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
        executor, decides = Executor(rank, wires, cpu), SwapLoop()
        executor.swaps = HostSwaps(executor.store, cpu, decides.limit, host)
        room = partial(Room, int(cap * setting.whole_bytes) + UNDER_WAY * _BOUNDARY_BYTES, 0)
        times, peak = [], 0
        for number in range(1 + setting.repeats):
            programs = decides.programs(plain, setting.size)
            took = batch_ms(executor, programs(setting.size))
            decides.end(executor, setting.size, room, plain)
            if number:
                times.append(took)
                peak = max(peak, executor.counter.peak_bytes)
        mine: tuple[float, int] = (decides.limit.share, peak)
        every: list[Any] = [None] * setting.stages
        dist.all_gather_object(every, mine)
        assert isinstance(programs.swaps, LevelsOfStages)
        shares, peaks = ([one[at] for one in every] for at in (0, 1))
        levels = list(programs.swaps.levels)
        found.append({"cap": cap, "levels": levels, "shares": shares, "peak_bytes": peaks, "batches_ms": times})
    host.close()
    wires.close()
    return found


def costs(setting: Setting, shares: list[float] | None = None, again: bool = False) -> Costs:
    """Return what the simulator is told: copies of a share of each micro-batch by stage; forwards computed `again`."""
    stages = range(setting.stages)
    # Storages leave as a whole.
    leaving = [-(-share * setting.storages // 1) / setting.storages for share in shares or [0.0] * setting.stages]
    copies = {
        Link(kind, stage, stage): Wire(transmit_ms=leaving[stage] * setting.copy_ms)
        for stage in stages
        for kind in ("swap out", "swap in")
    }
    whole = Wire(transmit_ms=setting.copy_ms)
    backward_ms = setting.backward_ms + again * setting.forward_ms
    forwards, backwards = ((ms,) * setting.stages for ms in (setting.forward_ms, backward_ms))
    return Costs(forwards, backwards, {"evict": whole, "load": whole}, copies, awaited_swaps=True)


def other_ways(setting: Setting) -> dict[str, tuple[float, float]]:
    """Return, by name, the peak of the worst stage, of 1F1B's, and the simulated milliseconds."""
    plain, bpipe = (build("1f1b", setting.size, bpipe) for bpipe in (False, True))
    half = build("1f1b", setting.size, swaps=GAINING)
    saved = {0: Saved(setting.nbytes)}
    half_bytes = max(SwapRoom(row).peak_bytes(saved, 0.5) for row in half.schedule.actions)
    recomputed = (setting.nbytes + (setting.stages - 1) * _BOUNDARY_BYTES) / setting.whole_bytes
    return {
        "BPipe": (max(bpipe.schedule.peak_live) / setting.stages, simulate(bpipe, costs(setting)).makespan_ms),
        "half to the host": (
            half_bytes / setting.whole_bytes,
            simulate(half, costs(setting, [0.5] * setting.stages)).makespan_ms,
        ),
        "recomputation": (recomputed, simulate(plain, costs(setting, again=True)).makespan_ms),
    }


def results_of(setting: Setting, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the document's entries: of each cap the plan, predicted and measured, and what else fits."""
    ways = other_ways(setting)
    none_ms = simulate(build("1f1b", setting.size), costs(setting)).makespan_ms
    results = []
    for entry in measured:
        program = build("1f1b", setting.size, swaps=LevelsOfStages(tuple(entry["levels"])))
        predicted_ms = simulate(program, costs(setting, entry["shares"])).makespan_ms
        took = median(entry["batches_ms"])
        others = {name: ms for name, (peak, ms) in ways.items() if peak <= 1.02 * entry["cap"]}
        held = max(entry["peak_bytes"]) / setting.whole_bytes
        times = {"none_ms": none_ms, "predicted_ms": predicted_ms, "measured_ms": took}
        results.append({**entry, "peak": held, **times, "off": took / predicted_ms - 1, "others_ms": others})
    return results


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    names = ("BPipe", "half to the host", "recomputation")
    shown = Table("cap", "peak", "swapped, by stage", "predicted ms", "measured ms", "off", "× none", *names)
    for entry in results:
        plan = " ".join(
            f"{share:.0%}{'*' * (level == 'late')}" if level != "none" else "-"
            for share, level in zip(entry["shares"], entry["levels"], strict=True)
        )
        times = [f"{entry[of]:,.0f}" for of in ("predicted_ms", "measured_ms")]
        ratio = entry["predicted_ms"] / entry["none_ms"]
        others = [f"{entry['others_ms'][name]:,.0f}" if name in entry["others_ms"] else "" for name in names]
        shown.add_row(
            *(f"{entry['cap']:g}", f"{entry['peak']:.3f}", plan, *times, f"{entry['off']:+.1%}", f"{ratio:.3f}"),
            *others,
        )
    shown.caption = "*: the stage waits for each copy. Other ways: simulated ms, where they fit under the cap"
    return shown


def main() -> None:
    benchmark = Benchmark("capped", __doc__, repeats=3)
    add = benchmark.parser.add_argument
    add("--stages", type=positive, default=4, help="(default 4)")
    add("--micro-batches", type=positive, default=16, help="of a batch (default 16)")
    add("--caps", type=float, nargs="+", default=[0.75, 0.6, 0.45], help="of 1F1B's peak (default 0.75 0.6 0.45)")
    add("--forward-ms", type=float, default=40.0, help="(default 40)")
    add("--backward-ms", type=float, help="(default twice a forward)")
    add("--copy-ms", type=float, help="of all that a micro-batch saves, one way (default half a forward)")
    arguments = benchmark.parser.parse_args()
    forward_ms = arguments.forward_ms
    setting = Setting(
        arguments.stages,
        arguments.micro_batches,
        arguments.repeats,
        tuple(arguments.caps),
        forward_ms,
        arguments.backward_ms or 2 * forward_ms,
        forward_ms / 2 if arguments.copy_ms is None else arguments.copy_ms,
        storages=32,
        nbytes=2**20,
    )
    with progress_bar("caps", len(setting.caps) * (1 + setting.repeats)) as tick:
        measured = run_in_processes(setting.stages, measure, setting, tick=tick)
    results = results_of(setting, measured)
    benchmark.report(setting._asdict(), results, table(results))


if __name__ == "__main__":
    main()
