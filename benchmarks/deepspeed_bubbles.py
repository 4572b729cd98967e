"""What a batch takes with and without pipeline flushes: DeepSpeed's engine, EvenPipe's 1F1B, EvenPipe's 2BW.

Measured as in bubbles.py: the time of a call of `train_batch` on the slowest stage, in steady state, on emulated stages
that sleep to deadlines (a forward 100 ms, a backward 200 ms). Around them all is real: DeepSpeed's engines, one process
a stage over gloo, with torch's Adam and a log line a batch, which tells the loss.

    stock        DeepSpeed's own PipelineEngine
    evenpipe     EvenPipe's 1F1B
    2bw          EvenPipe's 2BW, its stream going on from round to round

    fp32         without clipping
    bf16         with ZeRO-1 and clipping: each step needs the norm over all stages

The three take turns in the same processes, each with an engine of its own: some batches to get going, some measured.
The figures are medians over rounds. Beside them stands theory, where messages, host and optimizer take no time:
(m + p − 1)(tf + tb) with a flush, m(tf + tb) without.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from emulation import Accelerator, clock_ms
from flushes import Setting, add_flags, common, result, settings_of, table
from harness import Benchmark, Tick, prepare_to_fork, progress_bar, run_in_processes
from sleeping_stages import follow_waits, slow_down
from torch import Tensor, nn

from evenpipe.schedule import ScheduleError, Stream, find

# Read when DeepSpeed is imported.
os.environ["DS_ACCELERATOR"] = "cpu"
with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
    warnings.simplefilter("ignore")
    import evenpipe.deepspeed  # isort: skip
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

evenpipe.deepspeed.install()

#: What each variant's configuration has under "evenpipe".
SECTIONS: Final[dict[str, dict[str, str] | None]] = {
    "stock": None,
    "evenpipe": {"schedule": "1f1b"},
    "2bw": {"schedule": "2bw"},
}
DTYPES: Final[dict[str, dict[str, Any]]] = {
    "fp32": {"gradient_clipping": 0.0},
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0},
}
CASES: Final = ("4x4", "4x8")
MICRO_BATCH: Final = 2
HIDDEN: Final = 64


def engine_of(variant: str, setting: Setting, dtype: str) -> Any:
    """An engine with one layer a stage."""
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": setting.micro_batches,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 1,
        **DTYPES[dtype],
    }
    if (section := SECTIONS[variant]) is not None:
        config["evenpipe"] = section
    net = PipelineModule(
        [LayerSpec(nn.Linear, HIDDEN, HIDDEN) for _ in range(setting.stages)],
        num_stages=setting.stages,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)
    return engine


def samples(dtype: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Always the same micro-batch."""
    inputs, targets = torch.ones(2, MICRO_BATCH, HIDDEN, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    return itertools.repeat((inputs, targets))


def quiet(rank: int) -> None:
    """What DeepSpeed prints, at each batch too, is no result."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def measure(rank: int, setting: Setting, dtype: str, tick: Tick) -> dict[str, list[float]]:
    """In each process: milliseconds of a batch in every round, per variant."""
    warnings.simplefilter("ignore")
    # DeepSpeed would compile a shared-memory all-reduce.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    accelerator = Accelerator(setting.forward_ms, 2 * setting.forward_ms)
    follow_waits(accelerator)
    engines = {name: engine_of(name, setting, dtype) for name in SECTIONS}
    data = samples(dtype)
    for engine in engines.values():
        slow_down(engine.module, accelerator)
    times: dict[str, list[float]] = {name: [] for name in SECTIONS}
    # What stages held is no result either.
    with open(os.devnull, "w") as log, contextlib.redirect_stderr(log):
        for _ in range(setting.repeats):
            for name, engine in engines.items():
                dist.barrier()
                accelerator.not_before(clock_ms())
                for _ in range(setting.warm_up):
                    engine.train_batch(data)
                start_ms = clock_ms()
                for _ in range(setting.batches):
                    engine.train_batch(data)
                took = torch.tensor((clock_ms() - start_ms) / setting.batches, dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[name].append(took.item())
                tick()
    return times


def main() -> None:
    benchmark = Benchmark("deepspeed_bubbles", __doc__, repeats=5)
    add_flags(benchmark, CASES)
    benchmark.parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES), help="(default both)")
    arguments = benchmark.parser.parse_args()
    settings = settings_of(arguments)
    try:
        for setting in settings:
            Stream(find("2bw"), setting.stages, setting.micro_batches)
    except ScheduleError as error:
        benchmark.parser.error(str(error))
    prepare_to_fork()
    results = []
    for dtype, setting in itertools.product(arguments.dtypes, settings):
        with progress_bar(f"{setting.stages} stages, {dtype}", len(SECTIONS) * setting.repeats) as tick:
            times = run_in_processes(setting.stages, measure, setting, dtype, tick=tick, enter=quiet)
            results.append(result(setting, times, dtype=dtype))
    where = {"deepspeed": deepspeed.__version__}
    benchmark.report(common(arguments) | where, results, table(results, dtype="dtype"))


if __name__ == "__main__":
    main()
