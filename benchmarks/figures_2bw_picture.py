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
    """Write a PNG with a row for each kind of model."""
    panels = [list(of) for _, of in groupby(results["published"], key=lambda one: one["figure"])]
    figures = sorted({of[0]["figure"][0] for of in panels})
    widest = 1 + max(sum(of[0]["figure"][0] == figure for of in panels) for figure in figures)
    drawing = Figure(figsize=(3.4 * widest, 3.3 * len(figures)), layout="constrained")
    rows = drawing.subplots(len(figures), widest, squeeze=False)
    for row, figure in zip(rows, figures, strict=True):
        of_figure = [of for of in panels if of[0]["figure"][0] == figure]
        for axes, of in zip(row, of_figure, strict=False):
            throughput(axes, of)
        for axes in row[len(of_figure) : -1]:
            axes.set_axis_off()
        names = {of[0]["model"] for of in of_figure}
        footprints(row[-1], [one for one in results["footprints"] if one["model"] in names])
    rows[0][0].legend(frameon=False, fontsize=7, loc="upper left")
    drawing.savefig(path, dpi=90)


def throughput(axes: Axes, of: Sequence[dict[str, Any]]) -> None:
    batches = sorted({one["batch"] for one in of})
    for number, system in enumerate(COLOURS):
        values = [next(one for one in of if (one["batch"], one["system"]) == (n, system)) for n in batches]
        heights = [one["samples_per_second"] for one in values]
        places = [at + 0.2 * (number - 1.5) for at in range(len(batches))]
        bars = axes.bar(places, heights, 0.2, color=COLOURS[system], label=system)
        axes.bar_label(bars, [f"{value:.0f}" for value in heights], fontsize=6)
    axes.set_xticks(range(len(batches)), [f"batch {n:,}" for n in batches])
    axes.set_title(f"{of[0]['figure']}: {of[0]['model']}, {of[0]['stages']} stages", fontsize=9)
    axes.set_ylabel("samples/s, estimated", fontsize=8)
    axes.margins(y=0.2)


def footprints(axes: Axes, of: Sequence[dict[str, Any]]) -> None:
    """Solid: recomputed; pale: nothing recomputed; hatched: with BPipe."""
    labels = []
    for at, one in enumerate(of):
        solid = one["recompute"] == "full"
        axes.barh(
            at, one["gib"], color=COLOURS[one["system"]], alpha=1 if solid else 0.45, hatch="//" * one["bpipe"] or None,
            edgecolor="white",
        )  # fmt: skip
        axes.text(one["gib"], at, f" {one['gib']:.1f}", va="center", fontsize=6)
        labels.append(one["system"] + (" + rec." if solid else "") + (" + BPipe" if one["bpipe"] else ""))
    axes.axvline(MEMORY_GIB, color="black", lw=0.8, ls="--")
    axes.set_yticks(range(len(of)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("GiB, fullest GPU (dashed: 16 GB)", fontsize=8)
    if of:
        axes.set_title(f"8: {of[0]['model']}, batch 64, b = 8", fontsize=9)
