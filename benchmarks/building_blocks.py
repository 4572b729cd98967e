"""Compare a searched order with building blocks in a V, and with named schedules. By simulation.

Three cases of a size, by chance. "uneven": an embedding of 0.05 of a part, a head of 0.1 to 0.5, layers up to 5 % more
or less, messages of up to 0.15 of a stage's forward. "experts": every other part takes 1.1 to 1.4, the others as much
less, messages 0.05 to 0.3. An input gradient takes 1.0 to 1.3, a weight gradient 0.8 to 1.0 of a forward.

Memory is what the fullest stage saves, 1F1B's = 1. Speed is the busiest stage's work over the batch. All are the best
that fit by the case's own times:

    named      V-Min, V-Half, ZB-V and DualPipeV
    closed up  all building blocks, closed up for even stages as V-Half is
    justified  the same, justified for even stages by EvenPipe: more than what is published
    searched   for these times exactly; its starts include all of the others

The gains are means over p, m and the cases.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from statistics import fmean
from typing import Any, Final

from harness import Benchmark, positive, progress_bar
from rich.table import Table

from evenpipe.order_search.blocks import blocks, closed_up_order, repeated_order
from evenpipe.order_search.clock import makespan
from evenpipe.order_search.costs import Part
from evenpipe.order_search.justifying import justified
from evenpipe.order_search.problem import Order, Problem
from evenpipe.order_search.search import Effort, Errors, search
from evenpipe.schedule import Size, find, vee

CASES: Final = (("uneven", 0), ("uneven", 1), ("experts", 0))
LEVELS: Final = (0.5, 0.625, 0.75, 0.875, 1.0)
NAMED: Final = ("v-min", "v-half", "zbv", "dualpipev")
RIVALS: Final = ("named", "closed_up", "justified")
EXACT: Final = Errors(0, 0, 0)
EVEN: Final = Part(forward_ms=1, input_gradient_ms=1, weight_gradient_ms=1)


def case(kind: str, stages: int, seed: int, micro_batches: int, level: float) -> Problem:
    """A case's problem, whose stages may hold so much of what 1F1B's fullest stage saves."""
    chance, count = random.Random(f"{'moe' if kind == 'experts' else kind}/{stages}/{seed}"), 2 * stages
    if kind == "uneven":
        layers = [1 + chance.uniform(-0.05, 0.05) for _ in range(count)]
        layers[0] *= 1.05
        layers[-1] *= 1 + chance.uniform(0.1, 0.5)
        message_ms = chance.uniform(0, 0.15)
    else:
        heavy = chance.uniform(1.1, 1.4)
        layers = [(heavy if at % 2 else 2 - heavy) * (1 + chance.uniform(-0.03, 0.03)) for at in range(count)]
        layers[-1] *= 1 + chance.uniform(0, 0.3)
        message_ms = chance.uniform(0.05, 0.3)
    inputs, weights = chance.uniform(1.0, 1.3), chance.uniform(0.8, 1.0)
    parts = [
        Part(forward_ms=ms / 2, input_gradient_ms=inputs * ms / 2, weight_gradient_ms=weights * ms / 2) for ms in layers
    ]
    return Problem(vee(stages), micro_batches, parts, [int(level * count)] * stages, message_ms)


def speeds(problem: Problem, seconds: float) -> dict[str, float]:
    """Return the best of each kind of orders that fits, and the processor time of the search."""
    stages = problem.places.stages
    size = Size(stages, problem.micro_batches, 2)
    even = Problem(problem.places, problem.micro_batches, [EVEN] * 2 * stages, problem.cap)

    def best(orders: Iterable[Order]) -> float:
        return max((problem.limit_ms / makespan(problem, one) for one in orders if problem.fits(one)), default=0.0)

    repeated = [(block, repeated_order(problem, block)) for block in blocks(stages)]
    fitting = [(block, order) for block, order in repeated if problem.fits(order)]
    found = {
        "named": best(problem.order(find(name).order(size)) for name in NAMED),
        "closed_up": best(closed_up_order(problem, block) for block, _ in fitting),
        "justified": best(justified(even, order) for _, order in fitting),
    }
    began = time.process_time()
    order = problem.order(search(problem, Effort(seconds), EXACT).best[0].actions)
    return found | {"searched": best([order]), "search_s": time.process_time() - began}


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people: means, by memory."""
    shown = Table("memory", *(name.replace("_", " ") for name in (*RIVALS, "searched")))
    for name in RIVALS:
        shown.add_column(f"over {name.replace('_', ' ')}")
    shown.add_column("longest search, s")
    for level in dict.fromkeys(one["memory"] for one in results):
        rows = [one for one in results if one["memory"] == level]
        means = (f"{fmean(one[name] for one in rows):.3f}" for name in (*RIVALS, "searched"))
        gains = (f"{fmean(one['searched'] / one[name] - 1 for one in rows):+.2%}" for name in RIVALS)
        shown.add_row(f"{level:g}", *means, *gains, f"{max(one['search_s'] for one in rows):.1f}")
    return shown


def main() -> None:
    benchmark = Benchmark("building_blocks", __doc__ or "", repeats=1)
    benchmark.parser.add_argument("--stages", type=positive, nargs="+", default=[4, 8], help="(default 4 8)")
    benchmark.parser.add_argument("--times", type=positive, nargs="+", default=[2, 4], help="m over p (default 2 4)")
    benchmark.parser.add_argument("--levels", type=float, nargs="+", default=LEVELS, help="of memory (default: five)")
    benchmark.parser.add_argument("--seconds", type=float, default=10.0, help="of each search (default 10)")
    arguments = benchmark.parser.parse_args()
    every = [
        (level, stages, times * stages, kind, seed)
        for level in arguments.levels
        for stages in arguments.stages
        for times in arguments.times
        for kind, seed in CASES
    ]
    results = []
    with progress_bar("cases", len(every)) as tick:
        for level, stages, micro_batches, kind, seed in every:
            about = {"memory": level, "stages": stages, "micro_batches": micro_batches, "parts": kind, "seed": seed}
            results.append(about | speeds(case(kind, stages, seed, micro_batches, level), arguments.seconds))
            tick()
    benchmark.report({"seconds": arguments.seconds}, results, table(results))


if __name__ == "__main__":
    main()
