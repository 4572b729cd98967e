"""Measure a training iteration with and without pipeline flushes: Megatron's 1F1B, EvenPipe's 1F1B, ZB-H1, V and 2BW.

Measured: the time from the start of a batch to the start of the next, on the slowest stage, in steady state. On: a tiny
megatron-core GPT (tied embeddings, one layer a stage) in Megatron's DDP with Megatron's Adam and clipping at 1.0, one
process a stage over gloo. Each stage really computes, and sleeps for the rest of the time that an accelerator would
take: a forward 100 ms, a backward 200 ms, to deadlines. An action ends at max(end of the action before, time at which
what it waits for was there) + its duration: like an accelerator, a stage has its next result one duration after it
could start, whatever its host did meanwhile. Messages and collectives are what is waited for.

An iteration is what Megatron-LM's `train_step` does: zero gradients, schedule, the optimizer's step with the norm over
all stages, all stages asked whether each has stepped and for the largest norm; then a line with the mean loss on the
last stage. With 2BW, as in EvenPipe's drop-in, nobody is asked: every stage knows the answers.

    megatron     Megatron's own forward_backward_pipelining_without_interleaving
    evenpipe     EvenPipe's 1F1B
    zb-h1        EvenPipe's ZB-H1; each half of a backward takes 100 ms
    v-half, zbv  EvenPipe's V-Half and ZB-V: two chunks a stage, each with a layer, untied, and half the time of a stage
    2bw          EvenPipe's 2BW, its stream going on from round to round

They take turns in the same processes, each with a model and an optimizer of its own: some batches to get going,
some measured. The figures are medians over rounds. Beside them stands theory, where messages, host and optimizer take
no time: (m + p − 1)(tf + tb) with a flush, m(tf + tb) without, m(tf + tb) + (p − 1)tf under ZB-H1;
of a V, the schedule's simulation.

With --megatron-lm PATH, the same stages, without backwards in halves, in the training loop of that checkout's own,
unmodified pretrain_gpt.py, a job a variant in every round; the times are those in Megatron's log, at every iteration.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pretrain_jobs
import torch
import torch.distributed as dist
from emulation import Accelerator, clock_ms
from flushes import Setting, add_flags, common, result, settings_of, table
from harness import Benchmark, Tick, prepare_to_fork, progress_bar, run_in_processes
from sleeping_stages import follow_waits, slow_down, slow_second_halves

with warnings.catch_warnings():
    # megatron-core warns of every optional package that is missing; none is needed here.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from variants import installed, patches_for

    from evenpipe.megatron.cpu_mode import cpu_mode
    from evenpipe.megatron.train_engine.learner import Learner, Stepped, make_learner, micro_batches, train_step
    from evenpipe.megatron.vee import vee_patches
    from evenpipe.train import data
    from evenpipe.train.engine import FailureContext
    from evenpipe.train.options import OptionsError, TrainOptions

#: EvenPipe's schedule of each variant.
SCHEDULES: Final[dict[str, str | None]] = {
    "megatron": None,
    "evenpipe": "1f1b",
    **{name: name for name in ("zb-h1", "v-half", "zbv", "2bw")},
}
#: Those of two chunks a stage.
PLACED: Final = ("v-half", "zbv")
VARIANTS: Final = tuple(SCHEDULES)
CASES: Final = ("4x4", "4x8", "8x8")
MODEL: Final[dict[str, Any]] = {"hidden": 32, "heads": 4, "seq_length": 16, "clip_grad": 1.0, "lr_decay": "none"}


def options_of(setting: Setting, name: str = "megatron") -> TrainOptions:
    """Return the options of a variant's model and training. Raises OptionsError where 2BW has no such pipeline."""
    shape = {"stages": setting.stages, "layers": setting.stages, "micro_batches": setting.micro_batches}
    TrainOptions.of(**MODEL, **shape, schedule="2bw")
    if name in PLACED:
        in_a_v = {"layers": 2 * setting.stages, "schedule": name, "untie_embeddings": True}
        return TrainOptions.of(**MODEL, **(shape | in_a_v))
    return TrainOptions.of(**MODEL, **shape)


@contextmanager
def placed(name: str) -> Iterator[None]:
    """Inside, Megatron's parallel state is one of chunks in a V, if the variant has them."""
    if name not in PLACED:
        yield
        return
    parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
    with vee_patches().in_force():
        yield
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


class Variant:
    """A model in training under one of `VARIANTS`."""

    def __init__(self, name: str, options: TrainOptions, accelerator: Accelerator, rank: int) -> None:
        with placed(name):
            self.learner: Learner = make_learner(options, data.load(options), torch.device("cpu"))
        chunks = self.learner.replica.chunks
        for chunk in chunks:
            slow_down(chunk.module, accelerator, name in ("zb-h1", *PLACED), len(chunks))
        self._name = name
        self._flushes = name != "2bw"
        self._streams = micro_batches(self.learner, 0)
        self._failure = FailureContext(rank)
        schedule = SCHEDULES[name]
        self._patches = None if schedule is None else patches_for(schedule, self.learner)

    def run(self, batches: int, log: Callable[[str], object]) -> list[float]:
        """Train on so many; when each of them started, and when the last one ended, in ms."""
        starts = []
        with placed(self._name), installed(self._patches):
            for _ in range(batches):
                starts.append(clock_ms())
                stepped = train_step(self.learner, self._streams, self._failure)
                updated, norm = agreed(stepped) if self._flushes else (stepped.updated, stepped.grad_norm)
                if stepped.reduced:
                    losses = [total / count for total, count in (one["lm loss"].tolist() for one in stepped.reduced)]
                    log(f"lm loss {sum(losses) / len(losses):.6f} | grad norm {norm} | skipped {not updated}\n")
        return [*starts, clock_ms()]


def agreed(stepped: Stepped) -> tuple[bool, float]:
    """What `train_step` asks of all stages: whether each has stepped, and the largest norm."""
    group = parallel_state.get_model_parallel_group()
    updated = torch.tensor([stepped.updated], dtype=torch.int)
    dist.all_reduce(updated, dist.ReduceOp.MIN, group=group)
    norm = torch.tensor([-1.0 if stepped.grad_norm is None else stepped.grad_norm])
    dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
    return bool(updated.item()), norm.item()


def measure(rank: int, setting: Setting, tick: Tick) -> dict[str, list[float]]:
    """In each process: milliseconds of a batch in every round, per variant."""

    def make(accelerator: Accelerator) -> dict[str, Variant]:
        return {name: Variant(name, options_of(setting, name), accelerator, rank) for name in VARIANTS}

    return in_turns(setting, make, tick)


def in_turns(setting: Setting, make: Callable[[Accelerator], dict[str, Variant]], tick: Tick) -> dict[str, list[float]]:
    """In each process: milliseconds of a batch in every round, of each variant that `make` makes; they take turns."""
    warnings.simplefilter("ignore")
    cpu_mode().apply()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=setting.stages)
    accelerator = Accelerator(setting.forward_ms, 2 * setting.forward_ms)
    follow_waits(accelerator)
    slow_second_halves(accelerator)
    variants = make(accelerator)
    times: dict[str, list[float]] = {name: [] for name in variants}
    with open(os.devnull, "w") as log:
        for _ in range(setting.repeats):
            for name, variant in variants.items():
                dist.barrier()
                accelerator.not_before(clock_ms())
                starts = variant.run(setting.warm_up + setting.batches, log.write)[setting.warm_up :]
                took = torch.tensor((starts[-1] - starts[0]) / setting.batches, dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[name].append(took.item())
                tick()
    return times


def main() -> None:
    benchmark = Benchmark("bubbles", __doc__, repeats=5)
    add_flags(benchmark, CASES)
    benchmark.parser.add_argument(
        "--megatron-lm", type=Path, metavar="PATH", help="a checkout whose pretrain_gpt.py is to be measured"
    )
    arguments = benchmark.parser.parse_args()
    checkout: Path | None = arguments.megatron_lm
    if checkout is not None and not (checkout / "pretrain_gpt.py").exists():
        benchmark.parser.error(f"--megatron-lm {checkout}: has no pretrain_gpt.py: name a Megatron-LM checkout")
    settings = settings_of(arguments)
    try:
        for setting in settings:
            options_of(setting)
    except OptionsError as error:
        benchmark.parser.error(str(error))
    prepare_to_fork()
    results = []
    for setting in settings:
        variants = VARIANTS if checkout is None else tuple(pretrain_jobs.VARIANTS)
        with progress_bar(f"{setting.stages} stages", len(variants) * setting.repeats) as tick:
            if checkout is None:
                times = run_in_processes(setting.stages, measure, setting, tick=tick)
            else:
                times = pretrain_jobs.measure(checkout.resolve(), setting, MODEL, tick)
            results.append(result(setting, times))
    where = {} if checkout is None else {"megatron_lm": checkout.name}
    benchmark.report(common(arguments) | where, results, table(results))


if __name__ == "__main__":
    main()
