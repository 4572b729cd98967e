"""What EvenPipe's 1F1B costs beside Megatron's own, where both compute the same.

Measured: the time of a training iteration (zeroing gradients, the schedule, the optimizer's step) on the slowest stage.
On: one tiny megatron-core GPT that really computes, on CPU over gloo, one process for each of its (by default four)
stages. Four variants take turns in the same processes, on the same model and data; each time their order is reversed.

    megatron     Megatron's own 1F1B, with nothing added
    evenpipe     EvenPipe's 1F1B, as a user gets it
    bpipe        the same with BPipe, whose transfers are copies by the processors that compute
    measured     EvenPipe's 1F1B with exact memory counters (`measure=True`)

A ratio is the median over repeats of the quotient of two iterations of the same repeat, so that it does not matter how
busy the machine was in different ones (it is not the quotient of the medians); half of the quotients lie between the
two that stand beside it. The same is told of the processor time of all stages: nearly the same where stages share few
processors, and hardly disturbed by whatever else runs there. "Threads that compute" is the part of it that is spent
where the schedule, forwards and backwards run: the rest is gloo's threads, which copy messages into and out of sockets.
"""

from __future__ import annotations

import time
import warnings
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from harness import Benchmark, Tick, positive, prepare_to_fork, progress_bar, run_in_processes
from rich.table import Table

from evenpipe.upstream import PatchSet

with warnings.catch_warnings():
    # megatron-core warns of every optional package that is missing; none is needed here.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from variants import installed

    from evenpipe.megatron.cpu_mode import cpu_mode
    from evenpipe.megatron.schedule import PipelineSchedule, in_place_of_megatron
    from evenpipe.megatron.train_engine.learner import make_learner, micro_batches, train_step
    from evenpipe.train import data
    from evenpipe.train.engine import FailureContext
    from evenpipe.train.options import OptionsError, TrainOptions

# The first iteration opens links, tells layouts and fills pools; the second is for caches.
WARM_UP: Final = 2
#: What each variant puts in Megatron's place; nothing for Megatron itself, which all are compared with.
VARIANTS: Final[dict[str, dict[str, Any] | None]] = {
    "megatron": None,
    "evenpipe": {},
    "bpipe": {"bpipe": True},
    "measured": {"measure": True},
}
#: What they are called for people.
TITLES: Final = {
    "megatron": "Megatron's 1F1B",
    "evenpipe": "EvenPipe's 1F1B",
    "bpipe": "with BPipe",
    "measured": "EvenPipe's 1F1B with exact counters of memory",
}


class Iteration(NamedTuple):
    """One iteration: time on the slowest stage; of all stages, processor time, and that of the threads that compute."""

    ms: float
    cpu_ms: float
    thread_ms: float


def measure(rank: int, options: TrainOptions, repeats: int, tick: Tick) -> dict[str, list[Iteration]]:
    """In each process: every iteration after the warm-up, per variant."""
    warnings.simplefilter("ignore")
    cpu_mode().apply()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=options.stages)
    learner = make_learner(options, data.load(options), torch.device("cpu"))
    turns = [
        (name, None if settings is None else in_place_of_megatron(PipelineSchedule("1f1b", **settings)))
        for name, settings in VARIANTS.items()
    ]

    def iterate(patches: PatchSet | None, number: int) -> Iteration:
        with installed(patches):
            dist.barrier()
            clocks = time.perf_counter, time.process_time, time.thread_time
            starts = [clock() for clock in clocks]
            train_step(learner, micro_batches(learner, number), FailureContext(rank))
            seconds = [clock() - start for clock, start in zip(clocks, starts, strict=True)]
        took = torch.tensor(seconds, dtype=torch.float64) * 1e3
        dist.all_reduce(took[:1], dist.ReduceOp.MAX)
        dist.all_reduce(took[1:], dist.ReduceOp.SUM)
        tick()
        return Iteration(*took.tolist())

    iterations: dict[str, list[Iteration]] = {name: [] for name in VARIANTS}
    for number in range(WARM_UP + repeats):
        for name, patches in turns:
            iterations[name].append(iterate(patches, number))
        turns.reverse()
    return {name: measured[WARM_UP:] for name, measured in iterations.items()}


def result(options: TrainOptions, iterations: dict[str, list[Iteration]]) -> dict[str, Any]:
    """The entry of the document: medians, median ratios to Megatron, and every iteration's time."""
    entry: dict[str, Any] = {"stages": options.stages, "micro_batches": options.micro_batches}
    for unit, infix in (("ms", ""), ("cpu_ms", "_cpu"), ("thread_ms", "_thread")):
        values = {name: [getattr(one, unit) for one in measured] for name, measured in iterations.items()}
        for name, mine in values.items():
            entry[f"{name}_{unit}"] = median(mine)
            entry[f"{name}{infix}_ratio"] = median(a / b for a, b in zip(mine, values["megatron"], strict=True))
    return entry | {"iterations_ms": {name: [one.ms for one in measured] for name, measured in iterations.items()}}


def table(entry: dict[str, Any]) -> Table:
    """The same for people."""
    shown = Table("variant", "ms, median", "× Megatron's: median of pairs", "half of the pairs", "cpu ms, median")
    shown.add_column("× Megatron's: median of pairs")
    threads = "megatron_thread_ms" in entry  # results of before 2026-11-28 lack them
    for title in ("of threads that compute, ms", "× Megatron's: median of pairs") if threads else ():
        shown.add_column(title)
    for name in VARIANTS:
        pairs = zip(*(entry["iterations_ms"][one] for one in (name, "megatron")), strict=True)
        spread = _half([mine / stock for mine, stock in pairs])
        shown.add_row(
            TITLES[name],
            f"{entry[f'{name}_ms']:,.1f}",
            f"{entry[f'{name}_ratio']:.3f}",
            "" if name == "megatron" else spread,
            f"{entry[f'{name}_cpu_ms']:,.1f}",
            f"{entry[f'{name}_cpu_ratio']:.3f}",
            *([f"{entry[f'{name}_thread_ms']:,.1f}", f"{entry[f'{name}_thread_ratio']:.3f}"] if threads else []),
        )
    return shown


def _half(ratios: list[float]) -> str:
    """Between which two half of them lie; nothing of a single one."""
    if len(ratios) < 2:
        return ""
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return f"{low:.3f} … {high:.3f}"


def main() -> None:
    benchmark = Benchmark("overhead", __doc__, repeats=30)
    for name, default in (("stages", 4), ("layers", 8), ("hidden", 128), ("seq-length", 128), ("micro-batches", 8)):
        text = f"as in evenpipe train (default {default})"
        benchmark.parser.add_argument(f"--{name}", type=positive, default=default, help=text)
    arguments = benchmark.parser.parse_args()
    shape = {name: value for name, value in vars(arguments).items() if name not in ("json", "repeats")}
    try:
        options = TrainOptions.of(**shape)
        TrainOptions.of(**shape, bpipe=True)
    except OptionsError as error:
        benchmark.parser.error(str(error))
    prepare_to_fork()
    with progress_bar(f"{options.stages} stages", len(VARIANTS) * (WARM_UP + arguments.repeats)) as tick:
        iterations = run_in_processes(options.stages, measure, options, arguments.repeats, tick=tick)
    entry = result(options, iterations)
    benchmark.report(shape | {"repeats": arguments.repeats}, [entry], table(entry))


if __name__ == "__main__":
    main()
