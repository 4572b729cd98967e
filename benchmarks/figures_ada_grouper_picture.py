"""The picture of `figures_ada_grouper.py`: a panel for each figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw"]

COLOURS: Final = ("#222222", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#cc6677")


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write a PNG with the figures that there are."""
    figures = list(dict.fromkeys(one["figure"] for one in results))
    columns = min(3, len(figures))
    rows = -(-len(figures) // columns)
    drawing = Figure(figsize=(5.6 * columns, 4.2 * rows), layout="constrained")
    panels = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(figures) :]:
        axes.set_axis_off()
    for axes, figure in zip(panels, figures, strict=False):
        of = [one for one in results if one["figure"] == figure and not one.get("replicas")]
        {"6": by_load, "10": by_hour}.get(figure, by_workers)(axes, of)
        axes.set_title(f"Figure {figure}, simulated", fontsize=10)
        axes.grid(alpha=0.3)
    drawing.savefig(path, dpi=80)


def by_load(axes: Axes, of: Sequence[dict[str, Any]]) -> None:
    """Throughput by what others leave of links, over that of k = 1 on a quiet network."""
    for k in sorted({one["k"] for one in of}):
        points = [one for one in of if one["k"] == k]
        heights = [one["samples_per_second"] / of[0]["samples_per_second"] for one in points]
        label = f"k={k}, b={points[0]['b']}"
        axes.plot([one["left"] for one in points], heights, "o-", ms=4, color=COLOURS[k - 1], label=label)
    loads = [one["left"] for one in of if one["k"] == 1]
    axes.set_xscale("log")
    axes.set_xticks(loads, [f"1/{1 / left:.0f}" for left in loads])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_xlabel("left of each link (GPT-Medium, 8 stages)")
    axes.set_ylabel("throughput relative to k=1 on a quiet network")
    axes.legend(frameon=False, fontsize=8)


def by_hour(axes: Axes, of: Sequence[dict[str, Any]]) -> None:
    """The tuner's estimates, and what it has chosen."""
    for k in sorted({one["k"] for one in of}):
        points = [one for one in of if one["k"] == k]
        x, y = ([one[key] for one in points] for key in ("hour", "samples_per_second"))
        axes.plot(x, y, "o:", ms=3, color=COLOURS[k - 1], label=f"k={k}, b={points[0]['b']}")
    chosen = [one for one in of if one["chosen"]]
    axes.plot(
        [one["hour"] for one in chosen], [one["samples_per_second"] for one in chosen], "r-", lw=2, label="chosen"
    )
    axes.set_xticks([one["hour"] for one in chosen], [f"hour {one['hour']}\n{one['left']:.0%} left" for one in chosen])
    axes.set_ylabel("samples/s, estimated by the tuner")
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.35 * (high - low), high)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center")


def by_workers(axes: Axes, of: Sequence[dict[str, Any]]) -> None:
    """Throughput of each k over that of k = 1, pipelines side by side."""
    keys = list(dict.fromkeys((one["platform"], one["model"], one["workers"], one["left"]) for one in of))
    keys = [key for key in keys if key[2] > 1]
    for at, key in enumerate(keys):
        points = [one for one in of if (one["platform"], one["model"], one["workers"], one["left"]) == key]
        for one in points:
            gain = 100 * (one["samples_per_second"] / points[0]["samples_per_second"] - 1)
            label = f"k={one['k']}" if at == 0 else None
            axes.plot(gain, at, "o", ms=4, color=COLOURS[one["k"] - 1], label=label)
    labels = [f"{model} × {workers}, {platform}, {left:.4g} left" for platform, model, workers, left in keys]
    axes.set_yticks(range(len(keys)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("% more samples/s than k=1")
    axes.legend(frameon=False, fontsize=7)
