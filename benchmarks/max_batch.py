"""The largest batches that fit into 40 GB, by method, beside DawnPiper's Tables 1 and 2.

Two rows stand beside the paper's DPiper: "EvenPipe" is EvenPipe's own exact search, with its picks of what to swap and
recompute, and "BiPar" the paper's Algorithm 1 followed to its end, with the same picks. All methods see the same
profiles: fp32, sequence length 512, times by the roofline of an A100 of 40 GB on PCIe 4 ×16. Table 1 counts
mini-batches with as many micro-batches as stages, Table 2 micro-batches. As in the paper (§5.2), memory alone is the
limit, for all methods. What vPipe swaps and recomputes is weighed as ours is, in bytes and in time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from statistics import fmean
from typing import Any, Final, NamedTuple

from harness import Benchmark, progress_bar
from rich.console import Group
from rich.table import Table
from rivals.gpipe import gpipe_fits
from rivals.layers import Layers
from rivals.pipedream import pipedream_fits
from rivals.profiles import DEVICE, EVERY, LIMIT_BYTES, MODELS, problem_of, profiles_of
from rivals.vpipe import vpipe
from rivals.zero import zero_fits

from evenpipe.partition.dawnpiper.bipar import bipar
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.profile import Profile
from evenpipe.partition.search.exact import best_partition
from evenpipe.partition.search.finding import largest_batch

Fits = Callable[[Profile], bool]


class Method(NamedTuple):
    """A row of a table; `paper`: its batches there, by stages, in the order of MODELS."""

    table: int
    optimized: str
    name: str
    fits: Callable[[int], Fits]
    paper: dict[int, tuple[int, ...]]

    @property
    def algorithm(self) -> str:
        return ALGORITHMS[self.name]


def _layered(fits: Callable[..., bool], stages: int, *more: Any) -> Fits:
    return lambda profile: fits(Layers(profile), stages, LIMIT_BYTES, *more)


def _vpipe(mode: str, optimize: Optimize, memory_aware: bool, stages: int) -> Fits:
    return lambda profile: vpipe(Layers(profile), problem_of(profile, mode, stages, optimize), memory_aware) is not None


def _ours(mode: str, optimize: Optimize, stages: int) -> Fits:
    return lambda profile: best_partition(problem_of(profile, mode, stages, optimize), 0) is not None


def _bipar(mode: str, optimize: Optimize, stages: int) -> Fits:
    """Whether Algorithm 1, to its end, finds anything: the first that it finds is enough."""

    def fits(profile: Profile) -> bool:
        problem = problem_of(profile, mode, stages, optimize)
        part = bipar(problem, floor_ms=inf).part
        peaks = None if part is None else problem.peaks(part.cuts)
        return peaks is not None and max(peaks) <= LIMIT_BYTES

    return fits


def _zero(stage: int, replicas: int) -> Fits:
    return _layered(zero_fits, replicas, stage)


BOTH: Final[Optimize] = "swap+recompute"
#: What made a row's partitions.
ALGORITHMS: Final = {
    "ZeRO-2": "no pipeline: data parallel, optimizer state and gradients divided",
    "ZeRO-3": "no pipeline: data parallel, parameters divided too",
    "GPipe": "layers, by time as torchgpipe balances them",
    "PipeDream": "layers, by time",
    "vPipe": "layers, moved between neighbours",
    "layers by memory": "layers, moved between neighbours where memory is too little",
    "EvenPipe": "EvenPipe's exact search over nodes",
    "BiPar": "DawnPiper's Algorithm 1 over nodes, to its end",
}
#: The paper's rows DPiper-S and DPiper-AS, by table and what is optimised.
DPIPER: Final[dict[tuple[int, str], dict[int, tuple[int, ...]]]] = {
    (1, "none"): {4: (72, 8, 160, 360), 8: (136, 16, 320, 560)},
    (1, "S+R"): {4: (160, 32, 424, 1220), 8: (280, 60, 800, 2180)},
    (2, "none"): {4: (32, 3, 78, 150), 8: (40, 5, 84, 128)},
    (2, "S+R"): {4: (84, 10, 192, 480), 8: (100, 22, 248, 528)},
}
METHODS: Final = (
    Method(1, "none", "ZeRO-2", partial(_zero, 2), {4: (64, 8, 140, 412), 8: (128, 16, 224, 824)}),
    Method(1, "none", "ZeRO-3", partial(_zero, 3), {4: (64, 8, 132, 404), 8: (128, 16, 208, 808)}),
    Method(1, "none", "GPipe", lambda p: _layered(gpipe_fits, p, False), {4: (52, 8, 144, 280), 8: (88, 16, 256, 480)}),
    Method(1, "none", "vPipe", partial(_vpipe, "sync", "none", False), {4: (60, 8, 144, 188), 8: (88, 16, 256, 264)}),
    Method(1, "none", "layers by memory", partial(_vpipe, "sync", "none", True), {}),
    Method(1, "none", "EvenPipe", partial(_ours, "sync", "none"), DPIPER[1, "none"]),
    Method(1, "none", "BiPar", partial(_bipar, "sync", "none"), DPIPER[1, "none"]),
    Method(1, "R", "GPipe", lambda p: _layered(gpipe_fits, p, True), {4: (120, 28, 348, 644), 8: (208, 48, 664, 1384)}),
    Method(1, "S+R", "vPipe", partial(_vpipe, "sync", BOTH, True), {4: (128, 28, 348, 720), 8: (208, 56, 664, 1424)}),
    Method(1, "S+R", "EvenPipe", partial(_ours, "sync", BOTH), DPIPER[1, "S+R"]),
    Method(1, "S+R", "BiPar", partial(_bipar, "sync", BOTH), DPIPER[1, "S+R"]),
    Method(2, "none", "PipeDream", partial(_layered, pipedream_fits), {4: (16, 2, 40, 70), 8: (16, 2, 44, 64)}),
    Method(2, "none", "vPipe", partial(_vpipe, "async", "none", False), {4: (16, 2, 40, 48), 8: (16, 2, 44, 32)}),
    Method(2, "none", "layers by memory", partial(_vpipe, "async", "none", True), {}),
    Method(2, "none", "EvenPipe", partial(_ours, "async", "none"), DPIPER[2, "none"]),
    Method(2, "none", "BiPar", partial(_bipar, "async", "none"), DPIPER[2, "none"]),
    Method(2, "S+R", "vPipe", partial(_vpipe, "async", BOTH, True), {4: (46, 8, 110, 300), 8: (58, 16, 144, 214)}),
    Method(2, "S+R", "EvenPipe", partial(_ours, "async", BOTH), DPIPER[2, "S+R"]),
    Method(2, "S+R", "BiPar", partial(_bipar, "async", BOTH), DPIPER[2, "S+R"]),
)
#: Nothing, recomputation, swap and recomputation.
OPTIMIZED: Final = ("none", "R", "S+R")
#: EvenPipe over a rival: table, what is optimised, the rival with what, and the mean to be reached, by stages.
RATIOS: Final[tuple[tuple[int, str, str, str, dict[int, float]], ...]] = (
    (2, "none", "vPipe", "none", {4: 2.0, 8: 2.5}),
    (2, "S+R", "vPipe", "S+R", {4: 1.6, 8: 1.8}),
    (1, "S+R", "vPipe", "S+R", {4: 1.3, 8: 1.25}),
    (2, "S+R", "PipeDream", "none", {}),
    (1, "none", "GPipe", "none", {}),
)


def measure(title: str, stages: int, method: Method) -> dict[str, Any]:
    """A row for a model."""
    batches = stages if method.table == 1 else 1  # micro-batches that the table counts as one
    return {
        "table": method.table,
        "optimized": method.optimized,
        "method": method.name,
        "algorithm": method.algorithm,
        "model": title,
        "stages": stages,
        "batch": batches * largest_batch(profiles_of(title), method.fits(stages)),
        "paper": method.paper[stages][list(MODELS).index(title)] if method.paper and title in MODELS else None,
    }


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """EvenPipe over each rival, by model and on average, ours beside the paper's."""
    batch = {(r["table"], r["optimized"], r["method"], r["stages"], r["model"]): (r["batch"], r["paper"]) for r in rows}
    found = []
    for table, optimized, rival, rivals, wanted in RATIOS:
        for count in sorted({row["stages"] for row in rows}):
            by_model = {}
            for model in dict.fromkeys(row["model"] for row in rows):
                keys = (table, optimized, "EvenPipe", count, model), (table, rivals, rival, count, model)
                if not all(key in batch for key in keys):
                    continue
                ours, other = (batch[key] for key in keys)
                by_model[model] = [ours[0] / other[0] if other[0] else None, ours[1] / other[1] if other[1] else None]
            if not by_model:
                continue
            known = [(own, paper) for own, paper in by_model.values() if own is not None and paper is not None]
            means = [fmean(pair[k] for pair in known) if known else None for k in (0, 1)]
            found.append(
                {
                    "table": table,
                    "over": f"{rival} ({rivals})",
                    "optimized": optimized,
                    "stages": count,
                    "by_model": by_model,
                    "mean": means[0],
                    "paper": means[1],
                    "to_reach": wanted.get(count),
                }
            )
    return found


def doubling(rows: list[dict[str, Any]]) -> float | None:
    """How EvenPipe's mini-batches of Table 1 with memory optimisation grow from 4 stages to 8, on average."""
    ours = {
        (r["stages"], r["model"]): r["batch"]
        for r in rows
        if (r["table"], r["optimized"], r["method"]) == (1, "S+R", "EvenPipe")
    }
    pairs = [(ours[8, model], four) for (stages, model), four in ours.items() if stages == 4 and (8, model) in ours]
    return fmean(eight / four for eight, four in pairs) if pairs else None


def main() -> None:
    benchmark = Benchmark("max_batch", __doc__ or "", repeats=1)
    benchmark.parser.add_argument(
        "--models", nargs="+", choices=EVERY, default=list(MODELS), help="(default: the paper's)"
    )
    benchmark.parser.add_argument("--stages", nargs="+", type=int, choices=(4, 8), default=[4, 8], help="(default 4 8)")
    benchmark.parser.add_argument(
        "--optimized",
        nargs="+",
        choices=OPTIMIZED,
        default=list(OPTIMIZED),
        help="what methods optimise (default: all)",
    )
    arguments = benchmark.parser.parse_args()
    methods = [method for method in METHODS if method.optimized in arguments.optimized]
    cases = [(model, stages, method) for model in arguments.models for stages in arguments.stages for method in methods]
    rows = []
    with progress_bar("batches", len(cases)) as tick:
        for case in cases:
            rows.append(measure(*case))
            tick()
    found = ratios(rows)
    grown = doubling(rows)
    settings = {"limit_bytes": LIMIT_BYTES, "device": DEVICE.name, "stages_doubled": grown}
    benchmark.report(settings, [*rows, *found], tables_of([*rows, *found]))


def tables_of(results: list[dict[str, Any]]) -> Group:
    """The same for people; `results`: rows, and what `ratios` makes of them."""
    rows, found = ([one for one in results if (key in one)] for key in ("method", "over"))
    models, grown = list(dict.fromkeys(row["model"] for row in rows)), doubling(rows)
    said = "" if grown is None else f"twice the stages: {grown:.2f} times the mini-batch with S+R (paper: 1.84)"
    return Group(*(_batches(number, rows, models) for number in (1, 2)), _ratios(found), said)


def _batches(number: int, rows: list[dict[str, Any]], models: list[str]) -> Table:
    table = Table("stages", "optimised", "method", *models, title=f"Table {number}: ours (paper's)")
    mine = [row for row in rows if row["table"] == number]
    for key in sorted({(r["stages"], METHOD_ORDER[r["optimized"], r["method"], number]) for r in mine}):
        row = [r for r in mine if (r["stages"], METHOD_ORDER[r["optimized"], r["method"], number]) == key]
        cells = (f"{r['batch']} ({r['paper'] if r['paper'] is not None else '–'})" for r in row)
        table.add_row(str(key[0]), row[0]["optimized"], f"{row[0]['method']}: {ALGORITHMS[row[0]['method']]}", *cells)
    return table


METHOD_ORDER: Final = {(m.optimized, m.name, m.table): place for place, m in enumerate(METHODS)}


def _shown(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _ratios(found: list[dict[str, Any]]) -> Table:
    table = Table("table", "stages", "EvenPipe", "over", "by model", "mean", "paper", "to reach")
    for one in found:
        by_model = ", ".join(f"{_shown(ours)} ({_shown(paper)})" for ours, paper in one["by_model"].values())
        wanted = "" if one["to_reach"] is None else f"≥ {one['to_reach']}"
        table.add_row(
            str(one["table"]),
            str(one["stages"]),
            one["optimized"],
            one["over"],
            by_model,
            _shown(one["mean"]),
            _shown(one["paper"]),
            wanted,
        )
    return table


if __name__ == "__main__":
    main()
