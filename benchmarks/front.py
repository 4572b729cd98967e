"""Memory against time: every known schedule, and what is searched at several amounts of memory. By simulation.

Parts are halves of stages, in a V, or as each schedule has them. "even": all take 1 for a forward and each half of a
backward, and messages are free. "uneven", by chance: an embedding of 0.05 of a half, a head of 0.1 to 0.5, layers up to
5 % more or less, an input gradient of 1.0 to 1.3 and a weight gradient of 0.8 to 1.0 of a forward, messages of up to
0.15 of a stage's forward. "experts": every other half takes 1.1 to 1.4, the others as much less, messages 0.05 to 0.3.

Memory is what the fullest stage saves, 1F1B's = 1; what is searched may have parts computed again, which leave a
twentieth of what they save. Speed is the busiest stage's work over the batch: 1 where it never
waits. "known": the fastest schedule with a name that fits, in which evictions are free. "gain": searched over known.
"wrong": the same if stages and actions take 5 % more or less than they were searched for, and messages as much longer
as half a standard normal's absolute value: the mean of 48 samples that the search has not seen, of which the least is
"least". "search, s": the processor time of the case's longest search.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import Benchmark, positive, progress_bar
from rich.table import Table

from evenpipe.order_search.clock import makespan
from evenpipe.order_search.costs import Part, RunCosts
from evenpipe.order_search.problem import Problem
from evenpipe.order_search.search import Effort, Errors
from evenpipe.report.figures import draw_fronts
from evenpipe.schedule import Size, find
from evenpipe.simulate.front import Front, front
from evenpipe.simulate.searched import searched

DRAWN: Final = (8, 32)
UNIT_BYTES: Final = 1000
KINDS: Final = ("even", "uneven", "experts")
SIZES: Final = {"saved_bytes": UNIT_BYTES, "recomputed_bytes": UNIT_BYTES // 20}


def halves(kind: str, stages: int) -> RunCosts:
    """The parts of a case."""
    chance, count = random.Random(f"{kind}, {stages} stages"), 2 * stages
    layers, inputs, weights, message = [1.0] * count, 1.0, 1.0, 0.0
    if kind == "uneven":
        layers = [chance.uniform(0.95, 1.05) for _ in layers]
        layers[0] *= 1.05
        layers[-1] *= chance.uniform(1.1, 1.5)
        message = chance.uniform(0, 0.3)
    elif kind == "experts":
        heavy = chance.uniform(1.1, 1.4)
        layers = [heavy if number % 2 else 2 - heavy for number in range(count)]
        layers[-1] *= chance.uniform(1, 1.3)
        message = chance.uniform(0.1, 0.6)
    if kind != "even":
        inputs, weights = chance.uniform(1.0, 1.3), chance.uniform(0.8, 1.0)
    parts = [
        Part(forward_ms=ms, input_gradient_ms=inputs * ms, weight_gradient_ms=weights * ms, **SIZES) for ms in layers
    ]
    return RunCosts(format="evenpipe.costs/1", placement="vee", parts=parts, message_ms=message)


def searched_in_time(costs: RunCosts, stages: int, micro_batches: int, effort: Effort) -> tuple[Front, float]:
    """Return the front, and the processor seconds of its longest search."""
    began: list[float] = []
    found = front(costs, stages, micro_batches, effort, told=lambda line: began.append(time.process_time()))
    return found, max(end - start for start, end in pairwise([*began, time.process_time()]))


def wrong(costs: RunCosts, stages: int, micro_batches: int, effort: Effort) -> tuple[float, float]:
    """ZB-V's time over that of what is searched with as much memory: the mean of unseen samples, and the least."""
    capped = costs.model_copy(update={"memory_bytes": [2 * stages * UNIT_BYTES] * stages})
    problem = Problem.of(capped, stages, micro_batches)
    found = problem.order(searched(capped, stages, micro_batches, effort).program.schedule.actions)
    named = problem.order(find("zbv").order(Size(stages, micro_batches, 2)))
    unseen = list(zip(*Errors().samples(problem, 49, 12345), strict=True))[1:]
    gains = [makespan(problem, named, *one) / makespan(problem, found, *one) for one in unseen]
    return float(np.mean(gains)), min(gains)


def lines(case: dict[str, Any], found: Front) -> Iterator[dict[str, Any]]:
    for point in found.searched:
        best = found.best(point.peak_bytes)
        yield {
            **case,
            "memory": point.peak_bytes / found.base_bytes,
            "known": None if best is None else best.name,
            "known_speed": None if best is None else found.limit_ms / best.batch_ms,
            "searched_speed": found.limit_ms / point.batch_ms,
        }


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    shown = Table("p", "m", "parts", "memory", "known", "speed", "searched", "gain", "wrong", "least", "search, s")
    for one in results:
        speed, name = one["known_speed"], one["known"]
        gain = "–" if speed is None else f"{one['searched_speed'] / speed - 1:.1%}"
        told = (f"{one[key]:.3f}" if key in one else "" for key in ("wrong", "least"))
        longest = f"{one['longest_search_s']:.1f}" if "longest_search_s" in one else ""
        known = ("–", "–") if speed is None else (name, f"{speed:.3f}")
        sizes = str(one["stages"]), str(one["micro_batches"]), one["parts"], f"{one['memory']:.3g}"
        shown.add_row(*sizes, *known, f"{one['searched_speed']:.3f}", gain, *told, longest)
    return shown


def main() -> None:
    benchmark = Benchmark("front", __doc__ or "", repeats=1)
    benchmark.parser.add_argument("--stages", type=positive, nargs="+", default=[4, 8, 16], help="(default 4 8 16)")
    benchmark.parser.add_argument("--parts", choices=KINDS, nargs="+", default=KINDS, help="(default: all three)")
    benchmark.parser.add_argument("--seconds", type=float, default=5.0, help="of each search (default 5)")
    benchmark.parser.add_argument("--picture", type=Path, metavar="P.png", help=f"draw those of p, m = {DRAWN}")
    arguments = benchmark.parser.parse_args()
    effort = Effort(arguments.seconds)
    cases = [
        (stages, times * stages, kind)
        for stages in arguments.stages
        for times in ((2, 4) if stages < 16 else (2,))
        for kind in arguments.parts
    ]
    results, drawn = [], {}
    with progress_bar("fronts", len(cases)) as tick:
        for stages, micro_batches, kind in cases:
            costs = halves(kind, stages)
            found, longest_s = searched_in_time(costs, stages, micro_batches, effort)
            case = {"stages": stages, "micro_batches": micro_batches, "parts": kind}
            rows = list(lines(case, found))
            mean, least = wrong(costs, stages, micro_batches, effort)
            next(row for row in rows if row["memory"] == 1).update(wrong=mean, least=least, longest_search_s=longest_s)
            results += rows
            if (stages, micro_batches) == DRAWN:
                drawn[f"{kind} parts, {stages} stages, {micro_batches} micro-batches"] = found
            tick()
    if arguments.picture is not None and drawn:
        draw_fronts(arguments.picture, drawn)
    benchmark.report({"seconds": arguments.seconds}, results, table(results))


if __name__ == "__main__":
    main()
