"""The planner's estimates beside what others have published: memory verdicts, MFU, times of parts, and whose is best.

Three constants are fitted on rows of BPipe's Table 7 that Megatron-LM ran alone; all else is predicted.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np
from harness import Benchmark
from published.bpipe import best, breakdown, figure_3_gib, figure_8_gib, verdicts
from published.coverage import without_each
from published.fit import errors, fitted, left_out, unseen
from published.korthikanti import activation_errors, relative_errors
from published.lora import adapters
from published.megatron import golden_runs
from published.pipedream import figure_8_gib as figure_8_of_2bw
from published.pipedream import figure_11_billion, largest_micro_batch, table_1
from published.primus import misordered, speeds
from published.production import longer
from published.recipes import published
from published.recipes_fit import CONSTANTS, classes
from published.recipes_fit import errors as recipe_errors
from published.recipes_fit import fitted as fitted_recipes
from published.recipes_fit import left_out as model_left_out
from published.tables import Row, estimators, table, taken
from published.vtrain import iterations
from rich.table import Table

from evenpipe.descriptions import device
from evenpipe.planner.kernels import FITTED, UNFITTED, Calibration
from evenpipe.planner.stage_bytes import ALLOCATOR_SLACK
from evenpipe.planner.uncertainty import WITHIN

__all__ = ["measures"]

_SHOWN = ("gemm", "unfused", "peer")


def measures() -> dict[str, Any]:
    """Every figure, by what it is of."""
    programs, rows = estimators(), taken()
    ordinary, ours = [row for row in rows if not row.bpipe], [row for row in rows if row.bpipe]
    again = fitted(ordinary, programs)
    found: dict[str, Any] = {
        "fitted": {name: round(getattr(again, name), 4) for name in _SHOWN},
        "used": {name: getattr(FITTED, name) for name in _SHOWN},
        "verdicts": _verdicts(),
        "mfu": _spread(errors(rows)) | {"rows": len(rows)},
        "mfu_bpipe": _spread(errors(ours)),
        "mfu_nothing_fitted": _spread(errors(rows, UNFITTED, programs)),
        "mfu_left_out": _spread(left_out(ordinary, programs)),
        "mfu_other_model": {
            f"fitted on {one}": _spread(errors([row for row in rows if row.model != one], _on(one, ordinary, programs)))
            for one in ("gpt3-96b", "gpt3-134b")
        },
        "best": {name: _best(name) for name in ("gpt3-96b", "gpt3-134b")},
        "breakdown": breakdown(estimators()),
        "figure_3_gib": figure_3_gib(estimators()),
        "figure_8_gib": {"without": figure_8_gib(estimators(), False), "with": figure_8_gib(estimators(), True)},
        "table_6": _table_6(),
        "korthikanti": relative_errors(),
        "korthikanti_activations": activation_errors(),
        "vtrain": _vtrain(),
        "megatron_tests": [one._asdict() for one in golden_runs()],
        "pipedream": _pipedream(),
        "uncertainty": _coverage(programs),
        "recipes": _recipes(),
        "adapters": [one._asdict() for one in adapters()],
        "schedules": _schedules(),
    }
    return found


def _on(model: str, rows: list[Row], programs: estimators) -> Calibration:
    return fitted([row for row in rows if row.model == model], programs)


def _spread(points: np.ndarray[Any, Any]) -> dict[str, float]:
    return {"mean": float(np.mean(np.abs(points))), "worst": float(np.max(np.abs(points)))}


def _verdicts() -> dict[str, Any]:
    """How many are right, with the capacity that there is and with a little more or less."""
    found, have = verdicts(estimators()), device("a100-80gb").memory_gib
    right = {shift: sum((one.gib <= have + shift) == one.fits for one in found) for shift in (-2, -1, 0, 1, 2)}
    wrong = [
        f"{one.row.model} t{one.row.t} p{one.row.p} b{one.row.b} {one.run.recompute}: {one.gib:.1f} GiB"
        for one in found
        if (one.gib <= have) != one.fits
    ]
    return {"count": len(found), "right": right, "wrong": wrong}


def _best(model: str) -> dict[str, Any]:
    """The planner's choice with and without BPipe, and the paper's."""
    measured = [row for row in taken() if row.model == model]
    found: dict[str, Any] = {}
    for name, bpipe in (("with", True), ("without", False)):
        chosen = best(model, bpipe)
        run = chosen.run
        paper = max((row for row in measured if bpipe or not row.bpipe), key=lambda row: row.mfu)
        found[name] = {
            "chosen": [run.tensor, run.stages, run.micro_batch, run.recompute, run.bpipe],
            "paper": [paper.t, paper.p, paper.b, paper.recompute, paper.bpipe],
            "mfu": 100 * chosen.estimate.mfu,
            "paper_mfu": paper.mfu,
            "relative": 100 * chosen.estimate.mfu / paper.mfu - 1,
        }
    return found


def _table_6() -> list[dict[str, float]]:
    """How much BPipe costs where partners are on different nodes: MFU with over without, estimated and measured."""
    found = []
    for one in table("table6"):
        row = Row("gpt3-96b", 7, 8, 4, one["b"], one["recompute"], 0.0, False, one["line"])
        estimate = estimators()
        ratio = estimate(row, bpipe=True).mfu / estimate(row).mfu
        found.append({"b": one["b"], "estimated": ratio, "measured": one["bpipe"] / one["megatron"]})
    return found


def _pipedream() -> dict[str, Any]:
    """PipeDream-2BW's Table 1, and who runs out of memory where in its Figures 8 to 11."""
    return {
        "table_1": [{"model": group.model, "ordered": group.ordered, "rows": group.rows} for group in table_1()],
        "figure_8_gib": {name: figure_8_of_2bw(name) for name in ("gpt2-2.2b", "bert-2.2b")},
        "figure_9": {depth: largest_micro_batch("gpt2-1.3b", depth, 64 // depth, True) for depth in (4, 8)},
        "figure_10": {
            name: [largest_micro_batch(name, 8, 1, recomputed) for recomputed in (False, True)]
            for name in ("gpt2-1.3b", "gpt2-2.2b")
        },
        "figure_11_billion": {depth: figure_11_billion(depth) for depth in (8, 16, 32, 64)},
    }


def _schedules() -> dict[str, Any]:
    """Six schedules' speed over 1F1B's as Primus measured it, and which pairs are in another order."""
    found = speeds()
    wrong = [f"{one.schedule}, {other.schedule}" for one, other in misordered(found)]
    return {"speeds": [one._asdict() for one in found], "misordered": wrong}


def _vtrain() -> dict[str, Any]:
    """How far estimates are from vTrain's iterations, to which nothing was fitted, on the mean and in the middle."""
    found, each = iterations(), {}
    for name in ("all", *dict.fromkeys(one.model for one in found)):
        errors = np.array([one.error for one in found if name in ("all", one.model)])
        each[name] = {"mean": float(np.mean(np.abs(errors))), "median": float(np.median(np.abs(errors)))}
    return {"count": len(found), "covered": sum(one.covered for one in found), "errors": each}


def _coverage(programs: estimators) -> dict[str, Any]:
    """Of iterations of sources that a fit has not seen, how many are as far from the estimate as it says."""
    found = unseen(programs)
    every = [one for source in found.values() for one in source]
    within = [WITHIN.has(one) for one in every]
    return {
        "within": sum(within),
        "of": len(within),
        "largest": {source: max(map(abs, errors)) for source, errors in found.items()},
        "production": longer(),
        "left_out": {source: one._asdict() for source, one in without_each().items()},
    }


def _recipes() -> dict[str, Any]:
    """NVIDIA's iterations of 2025 and 2026, by constants fitted on all, or on all but a model's or source's."""
    rows = [row for row in published() if row.seconds is not None]
    now = np.expm1(recipe_errors(rows))
    apart = {
        "model": model_left_out(rows, [row.model.name for row in rows]),
        "source": model_left_out(rows, [row.source for row in rows]),
    }
    each: dict[str, Any] = {}
    for kind, of in classes(rows).items():
        longer = [float(1 / (1 + error) - 1) for error in apart["model"][of]]
        sure = [rows[n].estimate().uncertainty for n in of]
        each[kind] = {name: _spread(found[of]) for name, found in {"fitted": now, **apart}.items()}
        each[kind] |= {"rows": len(of), "longer": [min(longer), max(longer)]}
        each[kind]["within"] = sum(one.has(by) for one, by in zip(sure, longer, strict=True))
    memory = [[str(row), row.gib, row.allocated_gib()] for row in published() if row.gib is not None]
    return {"classes": each, "memory": memory, "used": dict(CONSTANTS), "fitted": fitted_recipes(rows)}


def _shown(found: dict[str, Any]) -> Table:
    shown = Table("published", "measured by", "planner", "limit")
    right = found["verdicts"]["right"]
    of = found["verdicts"]["count"]
    shown.add_row("BPipe Table 7, fits or not", f"{of} verdicts", f"{right[0]} right", "≥ 95 %")
    have, slack = device("a100-80gb"), ALLOCATOR_SLACK
    said = f"{have.memory_gib} GiB, {have.reserve_gib} kept; allocated × {slack['full']}, {slack['none']} if none again"
    shown.add_row("  capacity, reserve and allocator's slack", "", said, "stated")
    shown.add_row("  with 2 GiB less, more", "", f"{right[-2]}, {right[2]}", "≥ 95 %")
    for name, text, limit in (
        ("mfu", f"MFU, {found['mfu']['rows']} rows, three constants", "1.0; 2.5"),
        ("mfu_bpipe", "MFU, BPipe's rows, predicted", "1.5"),
        ("mfu_left_out", "MFU, each ordinary row left out", ""),
        ("mfu_nothing_fitted", "MFU, nothing fitted", "2.5"),
    ):
        shown.add_row(text, "points, mean; worst", _pair(found[name]), limit)
    for name, one in found["mfu_other_model"].items():
        shown.add_row(f"MFU of the other model, {name}", "points, mean; worst", _pair(one), "1.0")
    for name, both in found["best"].items():
        for which, one in both.items():
            same = "same" if one["chosen"] == one["paper"] else f"{one['chosen']} for {one['paper']}"
            shown.add_row(
                f"best of {name}, {which} BPipe", "MFU over measured", f"{same}, {one['relative']:+.1%}", "4 %"
            )
    parts = found["breakdown"]
    for part, limit in (("forward", "8 %"), ("backward", "8 %"), ("transfer", "15 %, full 25 %")):
        each = ", ".join(f"{100 * one[part]:+.1f}" for one in parts)
        shown.add_row(f"BPipe Tables 3, 4: {part}", "percent", each, limit)
    shown.add_row("BPipe Figure 3: first less last stage", "GiB", f"{found['figure_3_gib']:.1f}", "37 ± 10 %")
    apart = found["figure_8_gib"]
    shown.add_row("BPipe Figure 8: stages apart", "GiB", f"{apart['without']:.1f}; {apart['with']:.1f}", "> 25; ≤ 10")
    each = ", ".join(f"{one['estimated']:.3f} ({one['measured']:.3f})" for one in found["table_6"])
    shown.add_row("BPipe Table 6: with over without", "ratio of MFU (measured)", each, "")
    times = [abs(one) for one in found["korthikanti"].values()]
    shown.add_row(
        "Korthikanti Table 5: iteration", "mean; worst", f"{fmean(times):.2%}; {max(times):.2%}", "2.5 %; 5 %"
    )
    saved = [abs(one) for one in found["korthikanti_activations"].values()]
    shown.add_row("Korthikanti: activations", "worst", f"{max(saved):.2%}", "formula")
    _show_pipedream(shown, found["pipedream"])
    _show_unfitted(shown, found)
    sure = found["uncertainty"]
    shown.add_row(
        "iterations of sources not fitted, within what is said",
        f"± {WITHIN.high:.1%}",
        f"{sure['within']} of {sure['of']}",
        "all",
    )
    for source, largest in sure["largest"].items():
        shown.add_row(f"  {source}", "largest error", f"{largest:.1%}", "")
    for source, one in sure["left_out"].items():
        interval = f"  {source}, within {one['low']:+.1%} to {one['high']:+.1%} of the other sources"
        shown.add_row(interval, f"{one['of']} iterations", f"{one['inside']}", "")
    for name, (ratio, covered) in sure["production"].items():
        shown.add_row(name, "longer than estimated", f"{ratio:+.0%}{'' if covered else ', outside'}", "")
    for kind, one in found["recipes"]["classes"].items():
        for name in ("fitted", "model", "source"):
            said = "constants fitted on them" if name == "fitted" else f"on those of other {name}s"
            pair = f"{one[name]['mean']:.1%}; {one[name]['worst']:.1%}"
            shown.add_row(f"2025 and 2026, {kind}: {one['rows']} iterations", f"{said}, mean; worst", pair, "")
        name, within = f"2025 and 2026, {kind}: within what is said", f"{one['within']} of {one['rows']}"
        shown.add_row(name, "on constants of other models", within, "nine in ten")
    for one in found["adapters"]:
        text = f"{one['whole']:+.1%}; {one['packed']:+.1%}"
        shown.add_row(f"LoRA, 70B {one['name']}", "longer than measured: a sample whole; packed of 16", text, "8 %")
    order = found["schedules"]
    each = ", ".join(f"{one['schedule']} {one['estimated']:.3f} ({one['measured']:.3f})" for one in order["speeds"])
    shown.add_row("Primus, Llama 2 7B on 8 MI300X: schedules", "speed over 1F1B's (measured)", each, "")
    shown.add_row("  in another order", "of 15 pairs", "; ".join(order["misordered"]) or "none", "")
    for name, gib, estimated in found["recipes"]["memory"]:
        shown.add_row(f"  {name}", "GiB allocated", f"{estimated:.1f} for {gib:.1f}", "")
    return shown


def _show_unfitted(shown: Table, found: dict[str, Any]) -> None:
    of = found["vtrain"]
    for name, one in of["errors"].items():
        shown.add_row(f"vTrain: iteration, {name}", "mean; median", f"{one['mean']:.1%}; {one['median']:.1%}", "")
    shown.add_row("vTrain: within what is said", f"{of['count']} iterations", f"{of['covered']}", "")
    for one in found["megatron_tests"]:
        text = f"{one['estimated_gib']:.1f} for {one['gib']:.1f}"
        shown.add_row(f"Megatron's test, {one['name']}", "GiB allocated", text, "3 %")
        shown.add_row("", "longer than estimated", f"{one['longer']:+.0%}", "")


def _show_pipedream(shown: Table, found: dict[str, Any]) -> None:
    groups = found["table_1"]
    shown.add_row(
        "2BW Table 1: order", f"{len(groups)} groups", f"{sum(one['ordered'] for one in groups)} right", "all"
    )
    for one in groups:
        ratios = ", ".join(f"{estimated / published:.1f}" for _, published, estimated in one["rows"])
        shown.add_row(f"2BW Table 1: {one['model']}, size assumed", "estimated over published samples/s", ratios, "")
    for name, systems in found["figure_8_gib"].items():
        each = ", ".join(f"{system} {gib:.1f}" for system, gib in systems.items())
        limit = "only gpipe over" if name.startswith("gpt") else "none over"
        shown.add_row(f"2BW Figure 8: {name}, batch 64", f"GiB, of {device('v100-16gb').memory_gib}", each, limit)
    each = ", ".join(f"{b} at depth {depth}" for depth, b in found["figure_9"].items())
    shown.add_row("2BW Figure 9: largest micro-batch", "that fits", each, "32 ran at depth 8")
    each = ", ".join(f"{name} {b} and {recomputed}" for name, (b, recomputed) in found["figure_10"].items())
    shown.add_row("2BW Figure 10: the same", "without and with recomputation", each, "")
    each = ", ".join(f"{billion:.1f} at depth {depth}" for depth, billion in found["figure_11_billion"].items())
    shown.add_row("2BW Figure 11: largest model", "10^9 parameters", each, "about 30 at 64")


def _pair(one: dict[str, float]) -> str:
    return f"{one['mean']:.2f}; {one['worst']:.2f}"


def main() -> None:
    benchmark = Benchmark("planner_truth", __doc__ or "", repeats=1)
    benchmark.parser.parse_args()
    found = measures()
    benchmark.report(asdict(FITTED), [found], _shown(found))


if __name__ == "__main__":
    main()
