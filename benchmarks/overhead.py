"""What EvenPipe's 1F1B costs beside Megatron's own, where both compute the same.

Measured: the time of a training iteration (zeroing gradients, the schedule, the optimizer's step) on the slowest stage.
On: one tiny megatron-core GPT that really computes, on CPU over gloo, one process for each of its (by default four)
stages. Four variants take turns in the same processes, on the same model and data; each time their order is reversed.

    megatron     Megatron's own 1F1B, observed as in `evenpipe train --engine megatron`: when each action ran and what
                 it saved
    evenpipe     EvenPipe's 1F1B, observed alike
    bpipe        the same with BPipe, whose transfers are copies by the processors that compute
    unobserved   Megatron's own 1F1B with nothing added

A ratio is the median over repeats of the quotient of two iterations of the same repeat, so that it does not matter how
busy the machine was in different ones. Beside it stands that of the processor time of all stages: nearly the same where
stages share few processors, and hardly disturbed by whatever else runs there. EvenPipe always knows what its stages
hold, so `unobserved` is what a user would have without it.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from evenpipe.runtime.counters import MemoryCounter
from evenpipe.upstream import PatchSet
from harness import Benchmark, Tick, positive, progress_bar, run_in_processes
from rich.table import Table

with warnings.catch_warnings():
    # megatron-core warns of every optional package that is missing; none is needed here.
    warnings.simplefilter("ignore")
    from evenpipe.megatron import data
    from evenpipe.megatron.cpu_mode import cpu_mode
    from evenpipe.megatron.engines import Engine, _EvenPipe
    from evenpipe.megatron.follow import Follower, reporting_to
    from evenpipe.megatron.models import build_replica
    from evenpipe.megatron.options import OptionsError, TrainOptions
    from evenpipe.megatron.recorder import Recorder
    from evenpipe.megatron.schedule import in_place_of_megatron
    from evenpipe.megatron.whereabouts import Whereabouts
    from evenpipe.megatron.worker import _optimizer, _seed, _step, _Trainer
    from megatron.core import parallel_state

# The first iteration opens links, tells layouts and fills pools; the second is for caches.
WARM_UP: Final = 2
# Ratio's name: its numerator and denominator.
RATIOS: Final = {
    "evenpipe": ("evenpipe", "megatron"),
    "bpipe": ("bpipe", "megatron"),
    "evenpipe_to_unobserved": ("evenpipe", "unobserved"),
    "bpipe_to_unobserved": ("bpipe", "unobserved"),
}


class Iteration(NamedTuple):
    """One iteration: time on the slowest stage, and processor time of all stages together."""

    ms: float
    cpu_ms: float


class Variant(NamedTuple):
    """An engine, what it reports to, and what has to be patched while it is at work."""

    engine: Engine
    recorder: Recorder
    patches: PatchSet | None


class _Unobserved:
    """The engine that is Megatron as it is."""

    def __init__(self) -> None:
        self.counter = MemoryCounter()

    def start_batch(self) -> None:
        pass


def variants(options: TrainOptions, stage: int, parameters: list[torch.nn.Parameter]) -> dict[str, Variant]:
    """All of them, for one stage's process."""
    recorders = [Recorder(Whereabouts(stage)) for _ in range(4)]
    follower = Follower(options.plan.actions[stage], parameters, recorders[0])
    evenpipe = _EvenPipe(options, recorders[1])
    bpipe = _EvenPipe(options.model_copy(update={"bpipe": True}), recorders[2])
    return {
        "megatron": Variant(follower, recorders[0], reporting_to(follower)),
        "evenpipe": Variant(evenpipe, recorders[1], in_place_of_megatron(evenpipe.schedule)),
        "bpipe": Variant(bpipe, recorders[2], in_place_of_megatron(bpipe.schedule)),
        "unobserved": Variant(_Unobserved(), recorders[3], None),
    }


@contextmanager
def installed(patches: PatchSet | None) -> Iterator[None]:
    """`patches`, if any, applied inside."""
    if patches is None:
        yield
        return
    patches.apply()
    yield
    patches.revert()


def measure(rank: int, options: TrainOptions, repeats: int, tick: Tick) -> dict[str, list[Iteration]]:
    """In each process: every iteration after the warm-up, per variant."""
    warnings.simplefilter("ignore")
    cpu_mode().apply()
    cpu = torch.device("cpu")
    corpus = data.load(options)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=options.stages)
    _seed(options.seed)
    replica = build_replica(options, corpus.vocabulary, cpu)
    optimizer = _optimizer(options, replica)
    parameters = [parameter for chunk in replica.chunks for parameter in chunk.parameters()]

    def iterate(variant: Variant, number: int) -> Iteration:
        engine, recorder, patches = variant
        trainer = _Trainer(options, replica, optimizer, engine, recorder, corpus, cpu, Whereabouts(rank))
        with installed(patches):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            _step(trainer, number)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        took = torch.tensor([seconds, cpu_seconds], dtype=torch.float64) * 1e3
        dist.all_reduce(took[:1], dist.ReduceOp.MAX)
        dist.all_reduce(took[1:], dist.ReduceOp.SUM)
        tick()
        return Iteration(*took.tolist())

    turns = list(variants(options, rank, parameters).items())
    iterations: dict[str, list[Iteration]] = {name: [] for name, _ in turns}
    for number in range(WARM_UP + repeats):
        for name, variant in turns:
            iterations[name].append(iterate(variant, number))
        turns.reverse()
    return {name: measured[WARM_UP:] for name, measured in iterations.items()}


def result(options: TrainOptions, iterations: dict[str, list[Iteration]]) -> dict[str, Any]:
    """The entry of the document: medians, median ratios, and every iteration's time."""
    entry: dict[str, Any] = {"stages": options.stages, "micro_batches": options.micro_batches}
    for unit, infix in (("ms", ""), ("cpu_ms", "_cpu")):
        values = {name: [getattr(one, unit) for one in measured] for name, measured in iterations.items()}
        entry |= {f"{name}_{unit}": median(all_values) for name, all_values in values.items()}
        for ratio, (above, below) in RATIOS.items():
            entry[f"{ratio}{infix}_ratio"] = median(a / b for a, b in zip(values[above], values[below], strict=True))
    return entry | {"iterations_ms": {name: [one.ms for one in measured] for name, measured in iterations.items()}}


def table(entry: dict[str, Any]) -> Table:
    """The same for people."""
    shown = Table("variant", "ms", "× megatron", "× unobserved", "cpu ms", "× megatron", "× unobserved")
    for name in entry["iterations_ms"]:
        row = []
        for unit, infix in (("ms", ""), ("cpu_ms", "_cpu")):
            row.append(f"{entry[f'{name}_{unit}']:,.1f}")
            for against in ("", "_to_unobserved"):
                ratio = entry.get(f"{name}{against}{infix}_ratio")
                row.append("" if ratio is None else f"{ratio:.3f}")
        shown.add_row(name, *row)
    return shown


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
    # CPU mode is refused where CUDA is available.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # What is imported need not be searched for cycles in each process.
    gc.collect()
    gc.freeze()
    with progress_bar(f"{options.stages} stages", 4 * (WARM_UP + arguments.repeats)) as tick:
        iterations = run_in_processes(options.stages, measure, options, arguments.repeats, tick=tick)
    entry = result(options, iterations)
    benchmark.report(shape | {"repeats": arguments.repeats}, [entry], table(entry))


if __name__ == "__main__":
    main()
