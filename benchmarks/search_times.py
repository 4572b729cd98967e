"""How long `evenpipe partition` searches, and how near BiPar (DawnPiper's Algorithm 1) comes to the exact search.

All models, 4 and 8 stages of 40 GB, PipeDream's schedule; without memory optimisation at half of the largest
micro-batch and at the largest, with swap and recompute at 1.2, 2 and 4 times that. A plan tries a part of BiPar; alone
it is followed to its end, or for as many minutes as are given. φ is the most places between the two points of a range,
which the paper has below 100 for BERT (§4.2). Milliseconds of this process, which others on the machine do not count
in, and those that pass.
"""

from __future__ import annotations

import time
from typing import Any

from harness import Benchmark, progress_bar
from rich.table import Table
from rivals.profiles import DEVICE, EVERY, LIMIT_BYTES, problem_of, profiles_of

from evenpipe.partition.dawnpiper.bipar import bipar
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import PartitionError, Problem
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.finding import can_fit, find_plan, largest_batch

#: `Problem.weighed` that a core gets through: one takes a millisecond or two.
RANGES_A_MINUTE = 40_000
CASES: tuple[tuple[Optimize, float], ...] = (
    ("none", 0.5),
    ("none", 1.0),
    ("swap+recompute", 1.2),
    ("swap+recompute", 2.0),
    ("swap+recompute", 4.0),
)


def measure(
    title: str, stages: int, size: int, optimize: Optimize, repeats: int, minutes: float
) -> dict[str, Any] | None:
    """The fastest of several searches; None where nothing fits."""
    profile, workload = profiles_of(title)(size), Workload.of_mode("async", stages)
    cpu_ms, search_ms, plan = list[float](), list[float](), None
    for _ in range(repeats):
        began = time.process_time()
        try:
            plan = find_plan(profile, workload, stages, LIMIT_BYTES, optimize, DEVICE.host_gbps)
        except PartitionError:
            return None
        cpu_ms.append(1e3 * (time.process_time() - began))
        search_ms.append(plan.search_ms)
    assert plan is not None
    found = {
        "model": title,
        "stages": stages,
        "micro_batch_size": size,
        "optimize": optimize,
        "search_ms": min(search_ms),
        "cpu_ms": min(cpu_ms),
        "nodes_tried": plan.nodes_tried,
        "cut_short": not plan.binary_whole,
        "nodes": len(profile.nodes),
        "above_optimum": plan.max_stage_ms / plan.optimum_ms - 1,
    }
    return found | alone(profile, stages, optimize, plan.max_stage_ms, minutes)


def alone(profile: Profile, stages: int, optimize: Optimize, exact_ms: float, minutes: float) -> dict[str, Any]:
    """BiPar by itself: its longest stage over the plan's, nodes tried, φ, whether it ended, and what it took."""
    problem = problem_of(profile, "async", stages, optimize)
    began = time.process_time()
    found = bipar(problem, most_weighed=minutes * RANGES_A_MINUTE)
    return {
        "binary_over_exact": None if found.part is None else found.part.ms / exact_ms,
        "binary_nodes_tried": found.nodes_tried,
        "binary_widest": found.widest,
        "binary_whole": found.whole,
        "binary_cpu_ms": 1e3 * (time.process_time() - began),
    }


def main() -> None:
    benchmark = Benchmark("search_times", __doc__ or "", repeats=3)
    benchmark.parser.add_argument("--models", nargs="+", choices=EVERY, default=list(EVERY), help="(default: all)")
    add = benchmark.parser.add_argument
    add("--minutes", type=float, default=5.0, help="that BiPar alone may take for a case (default 5)")
    arguments = benchmark.parser.parse_args()
    results = list[dict[str, Any]]()
    with progress_bar("searches", len(arguments.models) * 2 * len(CASES)) as tick:
        for title in arguments.models:
            for stages in (4, 8):
                results += of_model(title, stages, arguments.repeats, arguments.minutes, tick)
    benchmark.report({"limit_bytes": LIMIT_BYTES, "device": DEVICE.name}, results, table(results))


def of_model(title: str, stages: int, repeats: int, minutes: float, tick: Any) -> list[dict[str, Any]]:
    """The cases of a model."""
    workload = Workload.of_mode("async", stages)

    def fits(profile: Profile) -> bool:
        return can_fit(Problem.of(profile, workload, stages, LIMIT_BYTES))

    largest = largest_batch(profiles_of(title), fits)
    rows = []
    for optimize, times in CASES:
        rows.append(measure(title, stages, max(1, round(largest * times)), optimize, repeats, minutes))
        tick()
    return [row for row in rows if row is not None]


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    columns = ("model", "stages", "micro-batch", "optimised", "ms", "CPU ms", "above optimum")
    shown = Table(*columns, "BiPar / exact", "tried", "φ (paper: < 100)")
    for row in results:
        ratio, whole, widest = (row.get(key) for key in ("binary_over_exact", "binary_whole", "binary_widest"))
        nothing = "nothing fits" if "binary_nodes_tried" in row else "–"
        found = nothing if ratio is None else f"{ratio:.4f}"
        shown.add_row(
            row["model"],
            str(row["stages"]),
            str(row["micro_batch_size"]),
            row["optimize"],
            f"{row['search_ms']:.0f}",
            f"{row['cpu_ms']:.0f}",
            f"{100 * row['above_optimum']:.2f} %",
            found + (", cut short" if whole is False else ""),
            str(row.get("binary_nodes_tried", f"{row['nodes_tried']}, cut short")),
            "–" if widest is None else str(widest),
        )
    return shown


if __name__ == "__main__":
    main()
