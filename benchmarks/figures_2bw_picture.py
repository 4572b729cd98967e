"""The picture of `figures_2bw.py`: throughput by panel as Figures 6 and 7, and memory as Figure 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw"]

COLOURS: Final = {"inter-layer": "#bbbbbb", "gpipe": "#ccbb44", "1f1b": "#4477aa", "2bw": "#cc6677"}
MEMORY_GIB: Final = 15.78


def draw(path: Path, results: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Write a PNG with a row for each kind of model, and what they need below."""
    panels = [list(of) for _, of in groupby(results["published"], key=lambda one: one["figure"])]
    figures = sorted({of[0]["figure"][0] for of in panels})
    widest = max(sum(of[0]["figure"][0] == figure for of in panels) for figure in figures)
    models = list(dict.fromkeys(one["model"] for one in results["footprints"]))
    drawing = Figure(figsize=(9.6, 2.9 * len(figures) + 4.2 * bool(models)), layout="constrained")
    *above, below = drawing.subfigures(
        len(figures) + 1, 1, squeeze=False, height_ratios=[2.9] * len(figures) + [4.2 if models else 0.01]
    )[:, 0]
    for part, figure in zip(above, figures, strict=True):
        of_figure = [of for of in panels if of[0]["figure"][0] == figure]
        row = part.subplots(1, widest, squeeze=False)[0]
        for axes, of in zip(row, of_figure, strict=False):
            throughput(axes, of)
        for axes in row[len(of_figure) :]:
            axes.set_axis_off()
        row[0].set_ylabel("samples/s, estimated", fontsize=9)
        if part is above[0]:
            row[0].legend(frameon=False, fontsize=8, loc="upper left")
    if models:
        for axes, name in zip(below.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            footprints(axes, [one for one in results["footprints"] if one["model"] == name])
    drawing.savefig(path, dpi=130)


def throughput(axes: Axes, of: Sequence[dict[str, Any]]) -> None:
    batches = sorted({one["batch"] for one in of})
    for number, system in enumerate(COLOURS):
        values = [next(one for one in of if (one["batch"], one["system"]) == (n, system)) for n in batches]
        heights = [one["samples_per_second"] for one in values]
        places = [at + 0.2 * (number - 1.5) for at in range(len(batches))]
        bars = axes.bar(places, heights, 0.2, color=COLOURS[system], label=system)
        axes.bar_label(bars, [f"{value:.0f}" for value in heights], fontsize=8)
    axes.set_xticks(range(len(batches)), [f"batch {n:,}" for n in batches], fontsize=9)
    axes.tick_params(labelsize=8)
    axes.set_title(f"{of[0]['figure']}: {of[0]['model']}, {of[0]['stages']} stages", fontsize=10)
    axes.margins(y=0.25)


def footprints(axes: Axes, of: Sequence[dict[str, Any]]) -> None:
    """Solid: recomputed; pale: nothing recomputed; hatched: with BPipe."""
    labels = []
    for at, one in enumerate(of):
        solid = one["recompute"] == "full"
        axes.barh(
            at, one["gib"], color=COLOURS[one["system"]], alpha=1 if solid else 0.45, hatch="//" * one["bpipe"] or None,
            edgecolor="white",
        )  # fmt: skip
        crossed = one["gib"] < MEMORY_GIB < one["gib"] + 3.5  # by the dashed line
        beside = MEMORY_GIB if crossed else one["gib"]
        axes.text(beside + 0.4, at, f"{one['gib']:.1f}", va="center", fontsize=8)
        labels.append(one["system"] + (" + rec." if solid else "") + (" + BPipe" if one["bpipe"] else ""))
    axes.axvline(MEMORY_GIB, color="black", lw=0.9, ls="--")
    axes.set_yticks(range(len(of)), labels, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("GiB, fullest GPU (dashed: 16 GB)", fontsize=9)
    axes.set_title(f"8: {of[0]['model']}, batch 64, b = 8 (rec.: recomputed)", fontsize=10)
