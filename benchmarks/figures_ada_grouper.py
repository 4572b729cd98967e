"""What groups of micro-batches gain on networks that are shared, as Ada-Grouper's Figures 6 to 10 draw it: simulated.

All by simulation, of the paper's models, devices and networks (Tables 1 and 2, §6.1), with stage times by rooflines;
stages are cut so that the longest is as short as it can be. The paper measured on networks of which others took what
nobody knew (§6); here they leave a part of every link. Figure 6: GPT-Medium on 8 stages, batch 192, k = 1 to 6, b = 6/k
in whole samples, which for k = 4 and 5 is 1. Figure 7: U-Nets that the partitioner has cut (`unet.py`; the paper gives
their size and no structure). Figure 8: GPTs that grow with the workers. Figure 9: GPT-Medium, b = 1, beside replicas
with b = 8, as SPMD was mostly data-parallel (line 274). In 7 and 8 b is the largest power of two that fits; the paper
does not say. Figure 10: six candidates of the tuner, which is told once an hour what messages take, and decides.

Gains are of the fastest k over k = 1. Beside them is what the paper's text has, by its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from ada_grouper_cases import figure_6, figure_7, figure_8, figure_9, figure_10
from figures_ada_grouper_picture import draw
from harness import Benchmark, progress_bar
from rich.console import Group
from rich.table import Table

FIGURES: Final = {"6": figure_6, "7": figure_7, "8": figure_8, "9": figure_9, "10": figure_10}
#: What the text says, by figure and, of the U-Nets, by model.
PAPER: Final = {
    "6": "line 249: 10 to 25 %; above 20 % where k = 1 falls to 90 %",
    "UNet-Base": "line 260: 2 to 14 %",
    "UNet-Medium": "line 260: 4 to 5 %",
    "8": "line 264: always faster, most at 8 workers",
    "9": "lines 270, 272: up to 20 %; replicas almost always slower",
    "10": "line 280: over 20 %, less in the third hour; 21 % in the fourth",
}


def comparisons(results: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of every pipeline on every network: k = 1, the fastest, what it gains, and replicas where there are any."""

    def of(one: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(one.get(key) for key in ("figure", "model", "platform", "workers", "hour", "left"))

    every: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in results:
        every.setdefault(of(one), []).append(one)
    keys = ("figure", "model", "platform", "workers", "hour", "left")
    for key, group in every.items():
        grouped = [one for one in group if not one.get("replicas")]
        plain = next(one for one in grouped if one["k"] == 1)
        best = min(grouped, key=lambda one: one["ms"])
        taken = next((one for one in grouped if one.get("chosen")), best)
        replicas = next((one["samples_per_second"] for one in group if one.get("replicas")), None)
        found = dict(zip(keys, key, strict=True)) | {"plain": plain["samples_per_second"], "b": plain["b"]}
        found |= {
            "taken": taken["samples_per_second"],
            "taken_k": taken["k"],
            "taken_b": taken["b"],
            "replicas": replicas,
        }
        yield found | {"best_k": best["k"], "gain": taken["samples_per_second"] / plain["samples_per_second"] - 1}


def tables(results: Sequence[dict[str, Any]]) -> Group:
    """The same for people: all of Figure 6, and of the others k = 1 and the fastest."""
    shown = []
    six = [one for one in results if one["figure"] == "6"]
    if six:
        columns = ["left of a link", *(f"k={one['k']}, b={one['b']}" for one in six[:6])]
        first = Table(*columns, title="Figure 6: samples/s over those of k = 1 on a quiet network")
        for left, row in groupby(six, key=lambda one: one["left"]):
            ratios = (one["samples_per_second"] / six[0]["samples_per_second"] for one in row)
            first.add_row(f"{left:.4g}", *(f"{ratio:.2f}" for ratio in ratios))
        shown.append(first)
    columns = ["figure", "model", "platform", "workers", "hour", "left", "k=1 (b), samples/s", "fastest", "gain"]
    gains = Table(*columns, "replicas", "the paper's gain", title="Gains of groups, simulated")
    said = ""
    for one in comparisons(results):
        paper = PAPER.get(one["model"]) or PAPER[one["figure"]]
        about = [one["figure"], one["model"], one["platform"], str(one["workers"]), str(one["hour"] or "")]
        taken = f"{one['taken']:.1f} (k={one['taken_k']}, b={one['taken_b']})"
        cells = [f"{one['left']:.4g}", f"{one['plain']:.1f} ({one['b']})", taken, f"{one['gain']:+.1%}"]
        replicas = "" if one["replicas"] is None else f"{one['replicas']:.1f}"
        gains.add_row(*about, *cells, replicas, paper if paper != said else "")
        said = paper
    return Group(*shown, gains)


def main() -> None:
    benchmark = Benchmark("figures_ada_grouper", __doc__ or "", repeats=1)
    add = benchmark.parser.add_argument
    add("--figures", nargs="+", choices=FIGURES, default=list(FIGURES), help="(default: all)")
    add("--picture", type=Path, metavar="P.png", help="all of them")
    arguments = benchmark.parser.parse_args()
    results: list[dict[str, Any]] = []
    with progress_bar("figures", len(arguments.figures)) as tick:
        for figure in arguments.figures:
            results += FIGURES[figure]()
            tick()
    if arguments.picture is not None:
        draw(arguments.picture, results)
    settings = {"simulated": True, "gains": list(comparisons(results)), "paper": PAPER}
    benchmark.report(settings, results, tables(results))


if __name__ == "__main__":
    main()
