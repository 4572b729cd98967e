"""What BPipe's transfers cost a pipeline: next to nothing while they overlap with compute, much if they are waited for.

Measured: the time of a batch of 1F1B without BPipe ("none"), with it ("asynchronous"), and with evictors that wait for
each eviction and load before they go on ("synchronous"). The three run by turns in the same processes, after a batch to
warm up; the figures are medians. BPipe's authors measured 1.1 % (asynchronous) and 11 % (synchronous).

On: emulated stages, one process each, driven by the executor, channels (gloo) and activation store that train real
models. A forward sleeps 40 ms, a backward 80 ms, to absolute deadlines: like an accelerator, a stage has its next
result one duration after it could start, whatever its host did meanwhile. Each micro-batch saves a tensor through
autograd; it is really evicted and loaded, and its backward checks that it got its own one back.

The wire between partners is emulated as well: the tensor is small (1 MiB), and each transfer takes half a forward from
the moment that both ends are ready and the wire is free. Tensors for which gloo itself takes so long have some 32 MiB,
and each end's processor copies for about 8 ms; at eight stages that is 40 % of two processors, and the figures would
say how copies and sleepers share them. The copy engines of accelerators take no compute time from anybody. To measure
real bytes all the same: --saved-mib 32 --transfer-ms 0 (of which the simulator then knows nothing).

Beside each figure stands what the simulator predicts for it, with free links between neighbours.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cached_property
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from emulation import Accelerator, clock_ms, emulated_stage, over_wires
from harness import Benchmark, Tick, positive, progress_bar, run_in_processes
from rich.table import Table

from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import EVICT, LOAD, Message, Program, ScheduleError, Size, Step, build, links, loop, lower
from evenpipe.simulate import Costs, Wire, simulate

MICRO_BATCHES: Final = {4: 12, 8: 16}
# Long enough for every process to have left the broadcast of the start.
START_DELAY_MS: Final = 20.0


class Setting(NamedTuple):
    """One pipeline."""

    stages: int
    micro_batches: int
    repeats: int
    forward_ms: float
    backward_ms: float
    transfer_ms: float
    saved_bytes: int


def programs(stages: int, micro_batches: int) -> dict[str, Program]:
    """What each mode carries out."""
    bpipe = build("1f1b", Size(stages, micro_batches), bpipe=True)
    return {
        "none": build("1f1b", Size(stages, micro_batches)),
        "asynchronous": bpipe,
        "synchronous": Synchronous(bpipe.schedule, bpipe.pairs),
    }


class Synchronous(Program):
    """The same with evictors that wait for each eviction and load before their next action."""

    @cached_property
    def steps(self) -> Sequence[tuple[Step, ...]]:
        return [row for row, _ in self._waiting]

    @cached_property
    def drain(self) -> Sequence[tuple[Message, ...]]:
        return [drain for _, drain in self._waiting]

    @cached_property
    def _waiting(self) -> list[tuple[tuple[Step, ...], tuple[Message, ...]]]:
        plain, found = lower(self.schedule, self.pairs), []
        for steps, drain in zip(plain.steps, plain.drain, strict=True):
            row: list[Step] = []
            waited: list[Message] = []
            for step in steps:
                complete = [message for message in step.complete if message not in waited]
                if row and row[-1].action.kind in (EVICT, LOAD) and row[-1].transfer is not None:
                    waited.append(row[-1].transfer)
                    complete = [row[-1].transfer, *(message for message in complete if message != row[-1].transfer)]
                follows = tuple(message for message in step.follows if message not in waited)
                row.append(step._replace(complete=tuple(complete), follows=follows))
            found.append((tuple(row), tuple(message for message in drain if message not in waited)))
        return found


def measure(rank: int, setting: Setting, tick: Tick) -> dict[str, list[float]]:
    """In each process: milliseconds of every batch, per mode."""
    cpu = torch.device("cpu")
    accelerator = Accelerator(setting.forward_ms, setting.backward_ms)
    connections = connect(range(setting.stages), links(loop(setting.stages), pairs=True), backend="gloo", device=cpu)
    wires = over_wires(connections, accelerator, setting.transfer_ms)
    executor = Executor(rank, wires, cpu)
    is_last = rank == setting.stages - 1

    def batch_ms(program: Program) -> float:
        """From the common start until the last stage is done."""
        start = torch.tensor(clock_ms() + START_DELAY_MS, dtype=torch.float64)
        dist.broadcast(start, 0)
        accelerator.start(start.item())
        executor.run(program, emulated_stage(accelerator, setting.saved_bytes, is_last))
        took = torch.tensor(clock_ms() - start.item(), dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        tick()
        return took.item()

    # The first batch with BPipe tells layouts and fills pools.
    batch_ms(programs(setting.stages, setting.stages)["asynchronous"])
    modes = programs(setting.stages, setting.micro_batches)
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(setting.repeats):
        for mode, program in modes.items():
            times[mode].append(batch_ms(program))
    wires.close()
    return times


def predicted_ms(setting: Setting) -> dict[str, float]:
    """What the simulator says, per mode."""
    modes = programs(setting.stages, setting.micro_batches)
    wire = Wire(transmit_ms=setting.transfer_ms)

    def predict(mode: str) -> float:
        # The simulator has its own way to wait, so that the two check each other.
        waits = mode == "synchronous"
        costs = Costs(
            forward_ms=(setting.forward_ms,) * setting.stages,
            backward_ms=(setting.backward_ms,) * setting.stages,
            wires={"evict": wire, "load": wire},
            synchronous_transfers=waits,
        )
        return simulate(modes["asynchronous" if waits else mode], costs).makespan_ms

    return {mode: predict(mode) for mode in modes}


def result(setting: Setting, times: dict[str, list[float]]) -> dict[str, Any]:
    """One entry of the document: medians, their ratios to `none`, the same as predicted, and every batch."""
    measured = {mode: median(batches) for mode, batches in times.items()}
    entry: dict[str, Any] = {"stages": setting.stages, "micro_batches": setting.micro_batches}
    for prefix, values in (("", measured), ("simulated_", predicted_ms(setting))):
        entry |= {f"{prefix}{mode}_ms": value for mode, value in values.items()}
        entry |= {f"{prefix}{mode}_ratio": values[mode] / values["none"] for mode in ("asynchronous", "synchronous")}
    return entry | {"batches_ms": times}


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    shown = Table("stages", "m", "BPipe", "ms", "× none", "simulated ms", "× none")
    for entry in results:
        for mode in entry["batches_ms"]:
            ratios = [f"{entry.get(f'{prefix}{mode}_ratio', 1):.3f}" for prefix in ("", "simulated_")]
            times = [f"{entry[f'{prefix}{mode}_ms']:,.0f}" for prefix in ("", "simulated_")]
            pipeline = (str(entry["stages"]), str(entry["micro_batches"])) if mode == "none" else ("", "")
            shown.add_row(*pipeline, mode, times[0], ratios[0], times[1], ratios[1])
        shown.add_section()
    return shown


def settings_of(arguments: argparse.Namespace) -> list[Setting]:
    """One pipeline for each value of --stages. Raises ScheduleError where it has no BPipe schedule."""
    settings = []
    for stages in arguments.stages:
        micro_batches = arguments.micro_batches or MICRO_BATCHES.get(stages, 2 * stages)
        programs(stages, micro_batches)
        transfer_ms = arguments.forward_ms / 2 if arguments.transfer_ms is None else arguments.transfer_ms
        times = arguments.forward_ms, arguments.backward_ms or 2 * arguments.forward_ms, transfer_ms
        settings.append(Setting(stages, micro_batches, arguments.repeats, *times, int(arguments.saved_mib * 2**20)))
    return settings


def main() -> None:
    benchmark = Benchmark("bpipe_overlap", __doc__, repeats=5)
    add = benchmark.parser.add_argument
    add("--stages", type=positive, nargs="+", default=[4, 8], help="pipelines to measure (default 4 8)")
    add("--micro-batches", type=positive, help="of a batch (default 12 on 4 stages, 16 on 8, else 2 a stage)")
    add("--forward-ms", type=float, default=40.0, help="(default 40)")
    add("--backward-ms", type=float, help="(default twice a forward)")
    add("--transfer-ms", type=float, help="of an eviction or load, besides its bytes (default half a forward)")
    add("--saved-mib", type=float, default=1.0, help="saved by one micro-batch (default 1)")
    arguments = benchmark.parser.parse_args()
    try:
        settings = settings_of(arguments)
    except ScheduleError as error:
        benchmark.parser.error(str(error).partition("\n")[0])
    results = []
    for setting in settings:
        with progress_bar(f"{setting.stages} stages", 1 + 3 * setting.repeats) as tick:
            results.append(result(setting, run_in_processes(setting.stages, measure, setting, tick=tick)))
    common = {
        "forward_ms": arguments.forward_ms,
        "backward_ms": settings[0].backward_ms,
        "transfer_ms": settings[0].transfer_ms,
        "saved_bytes": settings[0].saved_bytes,
        "repeats": arguments.repeats,
    }
    benchmark.report(common, results, table(results))


if __name__ == "__main__":
    main()
