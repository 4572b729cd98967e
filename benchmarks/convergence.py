"""Whether weights that are one batch older in every gradient train as well: 2BW against 1F1B with its flushes.

Measured: the loss on text that is not trained on, every so many iterations and at the end. On: a small megatron-core
GPT (next byte) and BERT (hidden bytes) on two stages, on the built-in text, of which the last tenth is held out; Adam,
a learning rate that rises for a tenth of the iterations and then falls to a tenth as a cosine, clipping at 1.0. Both
schedules start from the same weights and see the same samples in the same order; every evaluation is of the newest
weights, forward only, on the same samples. PipeDream-2BW's authors compare in this way (§5.1).

The learning rate decides: the delay takes away most of what momentum adds to the range of stable ones (docs/2bw.md).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from harness import Benchmark, Tick, positive, prepare_to_fork, progress_bar, run_in_processes
from matplotlib.figure import Figure
from published.two_bw import QUALITY
from rich.table import Table

with warnings.catch_warnings():
    # megatron-core warns of every optional package that is missing; none is needed here.
    warnings.simplefilter("ignore")
    from evaluation import Held, split
    from megatron.core import parallel_state
    from variants import installed, patches_for

    from evenpipe.megatron.cpu_mode import cpu_mode
    from evenpipe.megatron.train_engine.learner import make_learner, micro_batches, train_step
    from evenpipe.train import data
    from evenpipe.train.engine import FailureContext
    from evenpipe.train.options import OptionsError, TrainOptions

#: EvenPipe's schedule of each variant.
SCHEDULES: Final = {"flush": "1f1b", "2bw": "2bw"}
MODELS: Final = ("gpt", "bert")
PAPER: Final = f"PipeDream-2BW §5.1: test perplexities of GPT {QUALITY['fewer'].text}"
COLOURS: Final = {"flush": "#4477aa", "2bw": "#cc6677"}


class Curve(NamedTuple):
    """One run: the loss of every batch, and (iterations done, loss on held-out text) of every evaluation."""

    training: list[float]
    validation: list[tuple[int, float]]


def train(rank: int, options: TrainOptions, interval: int, tick: Tick) -> dict[str, Curve]:
    """In each process: a run of each variant."""
    warnings.simplefilter("ignore")
    cpu_mode().apply()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=options.stages)
    text, held_out = split(data.load(options))
    curves = {}
    for name, schedule in SCHEDULES.items():
        learner = make_learner(options, text, torch.device("cpu"))
        held = Held(learner, held_out)
        streams, losses, validation = micro_batches(learner, 0), [], []
        with installed(patches_for(schedule, learner)):
            for done in range(options.iterations):
                if done % interval == 0:
                    validation.append((done, held.loss()))
                stepped = train_step(learner, streams, FailureContext(rank))
                sums = [one["lm loss"].tolist() for one in stepped.reduced]
                losses.append(sum(total / count for total, count in sums) / options.micro_batches)
                tick()
            validation.append((options.iterations, held.loss()))
        told = [losses]
        dist.broadcast_object_list(told, src=options.stages - 1)
        curves[name] = Curve(told[0], validation)
    return curves


def result(options: TrainOptions, curves: dict[str, Curve]) -> dict[str, Any]:
    """One entry of the document: the last losses, how they compare, and the curves."""
    entry: dict[str, Any] = {"model": options.model}
    entry |= {f"{name}_loss": curve.validation[-1][1] for name, curve in curves.items()}
    entry["difference"] = entry["2bw_loss"] / entry["flush_loss"] - 1
    for name, other in (("flush", "2bw"), ("2bw", "flush")):
        reached = reaches(curves[name].validation, entry[f"{other}_loss"])
        entry[f"{name}_share"] = None if reached is None else reached / options.iterations
    return entry | {"curves": {name: curve._asdict() for name, curve in curves.items()}}


def reaches(validation: Sequence[tuple[int, float]], loss: float) -> float | None:
    """Iterations after which a held-out loss is as low, between evaluations on a straight line; None: never."""
    for (before, above), (after, below) in pairwise(validation):
        if below <= loss:
            return before + (after - before) * max(0.0, above - loss) / (above - below) if above > below else before
    return None


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    shares = ("flush has 2bw's last loss after", "2bw has flush's after")
    shown = Table("model", *SCHEDULES, "2bw compared", *shares, caption=PAPER)
    for entry in results:
        losses = [f"{entry[f'{name}_loss']:.4f}" for name in SCHEDULES]
        reached = (entry[f"{name}_share"] for name in SCHEDULES)
        cells = ("never" if share is None else f"{share:.0%} of the iterations" for share in reached)
        shown.add_row(entry["model"], *losses, f"{entry['difference']:+.2%}", *cells)
    return shown


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write a PNG with a panel for each model: training losses thin, held-out losses on top."""
    figure = Figure(figsize=(5 * len(results), 3.4), layout="constrained")
    for axes, entry in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        for name, curve in entry["curves"].items():
            axes.plot(range(1, len(curve["training"]) + 1), curve["training"], color=COLOURS[name], alpha=0.3, lw=0.6)
            label = f"{name}: {entry[f'{name}_loss']:.3f} at the end"
            style = {"ls": "-", "marker": "o"} if name == "flush" else {"ls": "--", "marker": "x"}
            axes.plot(*zip(*curve["validation"], strict=True), color=COLOURS[name], ms=4, lw=1.5, label=label, **style)
        axes.set_title(f"{entry['model'].upper()}: held-out loss (thin: training)")
        axes.set_xlabel("iterations")
        axes.set_ylabel("nats per byte")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=100)


def options_of(arguments: argparse.Namespace) -> list[TrainOptions]:
    """One run for each model. Raises OptionsError for what cannot be trained."""
    shape = {name: getattr(arguments, name) for name in SHAPE}
    training = {"lr_warmup": arguments.iterations // 10, "lr_decay": "cosine", "clip_grad": 1.0, "lr": arguments.lr}
    every = [TrainOptions.of(model=model, **shape, **training) for model in arguments.models]
    for options in every:
        TrainOptions.of(**options.model_dump(exclude_unset=True) | {"schedule": "2bw"})
    return every


SHAPE: Final = {
    "iterations": 1500,
    "stages": 2,
    "layers": 2,
    "hidden": 64,
    "seq_length": 64,
    "micro_batches": 2,
    "micro_batch_size": 16,
}


def main() -> None:
    benchmark = Benchmark("convergence", __doc__, repeats=1)
    add = benchmark.parser.add_argument
    for name, default in SHAPE.items():
        add(f"--{name.replace('_', '-')}", type=positive, default=default, help=f"(default {default})")
    add("--lr", type=float, default=3e-4, help="the highest (default 0.0003)")
    add("--models", choices=MODELS, nargs="+", default=list(MODELS), help="(default gpt bert)")
    add("--interval", type=positive, default=150, help="iterations between evaluations (default 150)")
    add("--picture", type=Path, metavar="P.png", help="both curves")
    arguments = benchmark.parser.parse_args()
    try:
        every = options_of(arguments)
    except OptionsError as error:
        benchmark.parser.error(str(error))
    prepare_to_fork()
    results = []
    for options in every:
        with progress_bar(options.model, len(SCHEDULES) * options.iterations) as tick:
            curves = run_in_processes(options.stages, train, options, arguments.interval, tick=tick)
        results.append(result(options, curves))
    if arguments.picture is not None:
        draw(arguments.picture, results)
    settings = {name: getattr(arguments, name) for name in (*SHAPE, "lr", "interval")}
    tokens = arguments.seq_length * arguments.micro_batch_size * arguments.micro_batches
    benchmark.report(settings | {"tokens_per_batch": tokens}, results, table(results))


if __name__ == "__main__":
    main()
