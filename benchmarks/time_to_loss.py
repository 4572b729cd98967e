"""Compare 1F1B with 2BW and PACI by the time to a loss, for each optimizer and correction of the delay.

Measured: the loss on held-out text of a small GPT in one process, by the rule of each run: flushes (no delay), 2BW, 2BW
with each correction, and PACI with a stage for each piece of the model and as many micro-batches; tests compare these
rules with pipelines, bit for bit. Every run has the same samples; the learning rate of each is the best of those given,
and of further ones, each by a factor 2, as long as the best is the least or the largest of several. Gradients are
clipped, but not PACI's. Iterations are counted, not timed: the time of one is theory's, (m + p - 1) / m under 1F1B for
1 under 2BW and PACI. So a busy machine changes nothing.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any, Final, NamedTuple

import torch
from harness import Benchmark, positive, progress_bar
from rich.table import Table
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from convergence import reaches
    from evaluation import split

    from evenpipe.train import data
    from evenpipe.train.options import TrainOptions
    from evenpipe.train.plain import learning_rate, loss_of, make_optimizer
    from evenpipe.train.transformer import initialised_piece

#: By how many steps gradients are ahead; None: no delay. Error feedback trains as weight-prediction does.
AHEAD: Final = {"1f1b": None, "2bw": 0.0, "weight-prediction": 1.0, "nesterov": 0.9}
#: PACI's gradients are of the newest weights; some forwards ran on those before.
PACI: Final = "paci"
RULES: Final = (*AHEAD, "error-feedback", PACI)
OPTIMIZERS: Final = ("adam", "muon")
#: Evaluations of a run, and samples of each.
EVALUATIONS, HELD = 10, 256


class Run(NamedTuple):
    """One training: its rule, optimizer, learning rate and seed."""

    rule: str
    optimizer: str
    lr: float
    seed: int


class Curve(NamedTuple):
    """(Iterations done, held-out loss) of every evaluation, and the last loss of the weights that gradients see."""

    validation: list[tuple[int, float]]
    ahead: float


def train(run: Run, options: TrainOptions) -> Curve:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    text, held = split(data.load(options))
    pieces = [initialised_piece(options, text.vocabulary, number) for number in range(options.layers + 2)]
    model = nn.Sequential(*pieces)
    ends = [parameter for piece in (pieces[0], pieces[-1]) for parameter in piece.parameters()]
    optimizer = make_optimizer(options, model.parameters(), ends)
    weights = list(model.parameters())
    newest = _copies(weights)
    seen, ahead = newest, newest
    validation = []
    for iteration in range(options.iterations):
        if iteration % max(1, options.iterations // EVALUATIONS) == 0:
            validation.append((iteration, _held_out(model, weights, newest, options, held)))
        factor = AHEAD.get(run.rule, 0.0)
        optimizer.zero_grad()
        batches = [[*map(torch.from_numpy, batch)] for batch in text.micro_batches(iteration, 0)]
        if run.rule == PACI:
            _drifting(pieces, seen, newest, [torch.cat(parts) for parts in zip(*batches, strict=True)])
        else:
            _fill(weights, newest if factor is None else seen)
            for tokens, *target in batches:
                (loss_of(model(tokens), target) / options.micro_batches).backward()
            nn.utils.clip_grad_norm_(weights, options.clip_grad)
        _fill(weights, newest)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, iteration)
        optimizer.step()
        before, newest = newest, _copies(weights)
        # The next batch sees what lay ahead before this step.
        seen = ahead
        ahead = [new + (factor or 0.0) * (new - old) for new, old in zip(newest, before, strict=True)]
    validation.append((options.iterations, _held_out(model, weights, newest, options, held)))
    return Curve(validation, _held_out(model, weights, ahead, options, held))


def _drifting(
    stages: Sequence[nn.Module], before: Sequence[Tensor], newest: Sequence[Tensor], batch: Sequence[Tensor]
) -> None:
    """Add up the gradients of PACI on p ``stages`` and p micro-batches of ``batch``.

    Stage s forwards its first p - 1 - s micro-batches on the weights ``before``, and backwards all on the ``newest``.
    """
    weights, count = [parameter for stage in stages for parameter in stage.parameters()], len(stages)
    for number, (tokens, *target) in enumerate(zip(*(part.chunk(count) for part in batch), strict=True)):
        early = [number < count - 1 - stage for stage, piece in enumerate(stages) for _ in piece.parameters()]
        _fill(weights, [old if is_early else new for is_early, old, new in zip(early, before, newest, strict=True)])
        loss = loss_of(nn.Sequential(*stages)(tokens), target) / count
        _fill(weights, newest)
        loss.backward()


@torch.no_grad()
def _held_out(
    model: nn.Module, weights: Sequence[Tensor], values: Sequence[Tensor], options: TrainOptions, held: data.Corpus
) -> float:
    _fill(weights, values)
    losses = []
    for iteration in range(-(-HELD // (options.micro_batches * options.micro_batch_size))):
        for batch in held.micro_batches(iteration, 0):
            tokens, *target = map(torch.from_numpy, batch)
            losses.append(loss_of(model(tokens), target).item())
    return statistics.fmean(losses)


def _copies(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


@torch.no_grad()
def _fill(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.data.copy_(value)  # unseen by autograd's check: under PACI forwards are under way


def rates(found: Mapping[Run, Curve], rule: str, optimizer: str) -> list[float]:
    """Those that a rule was tried at."""
    return sorted({run.lr for run in found if run[:2] == (_trained(rule), optimizer)})


def losses(found: Mapping[Run, Curve], rule: str, optimizer: str, rate: float) -> list[float]:
    """The last ones of each seed."""
    curves = [curve for run, curve in found.items() if run[:3] == (_trained(rule), optimizer, rate)]
    return [curve.ahead if rule == "error-feedback" else curve.validation[-1][1] for curve in curves]


def best(found: Mapping[Run, Curve], rule: str, optimizer: str) -> float:
    """The rate with the least mean loss; one that ends with no number is none."""

    def mean(rate: float) -> float:
        loss = statistics.fmean(losses(found, rule, optimizer, rate))
        return loss if math.isfinite(loss) else math.inf

    return min(rates(found, rule, optimizer), key=mean)


def beyond(found: Mapping[Run, Curve], rule: str, optimizer: str) -> list[float]:
    """The rates to try next, since the best is the least or the largest of several."""
    tried, chosen = rates(found, rule, optimizer), best(found, rule, optimizer)
    return [chosen * factor for edge, factor in ((0, 0.5), (-1, 2.0)) if len(tried) > 1 and chosen == tried[edge]]


def _trained(rule: str) -> str:
    return "weight-prediction" if rule == "error-feedback" else rule


def result(optimizer: str, rule: str, found: Mapping[Run, Curve], iterations: int, speed: float) -> dict[str, Any]:
    """One entry: the best rate, the last losses at it, and how far the run with flushes had come to that loss.

    `share_of_flush`: of its iterations, and `speed_to_loss`: how much sooner it is there than 1F1B, whose iteration
    takes `speed` times as long; None where 1F1B does not come as far.
    """
    rate, flushed = best(found, rule, optimizer), best(found, "1f1b", optimizer)
    last, flushes = losses(found, rule, optimizer, rate), losses(found, "1f1b", optimizer, flushed)
    curves = [curve.validation for run, curve in found.items() if run[:3] == ("1f1b", optimizer, flushed)]
    mean = [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in zip(*curves, strict=True)]
    reached = reaches(mean, statistics.fmean(last))
    share = None if reached is None else reached / iterations
    return {
        "optimizer": optimizer,
        "rule": rule,
        "lr": rate,
        "loss": statistics.fmean(last),
        "spread": statistics.stdev(last) if len(last) > 1 else 0.0,
        "losses": last,
        "behind": statistics.fmean(one - other for one, other in zip(last, flushes, strict=True)),
        "behind_spread": statistics.stdev([one - other for one, other in zip(last, flushes, strict=True)])
        if len(last) > 1
        else 0.0,
        "by_rate": {
            f"{tried:g}": statistics.fmean(losses(found, rule, optimizer, tried))
            for tried in rates(found, rule, optimizer)
        },
        "share_of_flush": share,
        "speed_to_loss": None if share is None else (1.0 if rule == "1f1b" else speed) * share,
    }


def table(results: Sequence[dict[str, Any]], stages: int, micro_batches: int) -> Table:
    """The same for people."""
    shown = Table(
        *(
            "optimizer",
            "rule",
            "best lr",
            "held-out loss",
            "behind 1F1B",
            "1F1B is there after",
            "× 1F1B's speed to it",
        ),
        caption=f"± standard deviation over seeds; the last column by theory, p = {stages}, m = {micro_batches}",
    )
    for entry in results:
        share, speed = entry["share_of_flush"], entry["speed_to_loss"]
        shown.add_row(
            entry["optimizer"],
            entry["rule"],
            f"{entry['lr']:g}",
            f"{entry['loss']:.4f} ± {entry['spread']:.4f}",
            f"{entry['behind']:+.4f} ± {entry['behind_spread']:.4f}",
            "never" if share is None else f"{share:.0%}",
            "sooner" if speed is None else f"{speed:.2f}",
        )
    return shown


def main() -> None:
    benchmark = Benchmark("time_to_loss", __doc__, repeats=3)
    add = benchmark.parser.add_argument
    add("--iterations", type=positive, default=200, help="of each run (default 200)")
    add("--hidden", type=positive, default=32, help="(default 32)")
    add("--lr", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3], help="the first rates (default 2e-3 4e-3 8e-3)")
    add("--optimizers", choices=OPTIMIZERS, nargs="+", default=list(OPTIMIZERS), help="(default adam muon)")
    add("--rules", choices=RULES, nargs="+", default=list(RULES), help="beside 1f1b (default all)")
    add("--stages", type=positive, default=8, help="p of the times (default 8)")
    add("--micro-batches", type=positive, default=8, help="m of the times (default 8)")
    add("--processes", type=positive, default=2, help="runs at a time (default 2)")
    arguments = benchmark.parser.parse_args()
    if any(not rate > 0 or not math.isfinite(rate) for rate in arguments.lr):
        benchmark.parser.error("--lr: rates must be positive")
    shape = {"layers": 2, "hidden": arguments.hidden, "seq_length": 64, "micro_batch_size": 8, "micro_batches": 2}
    training = {"iterations": arguments.iterations, "lr_warmup": arguments.iterations // 10, "lr_decay": "cosine"}
    same = {"engine": "module", "stages": 1, "clip_grad": 1.0, **shape, **training}
    rules = [rule for rule in RULES if rule == "1f1b" or rule in arguments.rules]
    trained = dict.fromkeys(map(_trained, rules))
    asked = {(rule, optimizer, rate) for optimizer, rule, rate in product(arguments.optimizers, trained, arguments.lr)}
    found: dict[Run, Curve] = {}
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        while asked:
            runs = [Run(*one, 1234 + seed) for one in sorted(asked) for seed in range(arguments.repeats)]
            every = [TrainOptions.of(**same, optimizer=run.optimizer, lr=run.lr, seed=run.seed) for run in runs]
            with progress_bar("runs", len(runs)) as tick:
                for run, curve in zip(runs, pool.map(train, runs, every), strict=True):
                    found[run] = curve
                    tick()
            asked = {
                (_trained(rule), optimizer, rate)
                for optimizer, rule in product(arguments.optimizers, rules)
                for rate in beyond(found, rule, optimizer)
            }
    speed = (arguments.micro_batches + arguments.stages - 1) / arguments.micro_batches
    results = [
        result(optimizer, rule, found, arguments.iterations, speed)
        for optimizer in arguments.optimizers
        for rule in rules
    ]
    settings = copy.copy(vars(arguments)) | {"tokens_per_batch": 64 * 8 * 2, "speed": speed}
    del settings["json"]
    benchmark.report(settings, results, table(results, arguments.stages, arguments.micro_batches))


if __name__ == "__main__":
    main()
