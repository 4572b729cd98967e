"""The picture of `figures_ada_grouper.py`: a panel for each figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

__all__ = ["draw"]

COLOURS: Final = ("#222222", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#cc6677")


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write a PNG with the figures that there are: those over loads and hours above, those over workers below."""
    figures = list(dict.fromkeys(one["figure"] for one in results))
    rows = [row for row in ([one for one in figures if (one in OVER) is over] for over in (True, False)) if row]
    drawing = Figure(figsize=(9.8, 3.9 * len(rows)), layout="constrained")
    for part, row in zip(drawing.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        for axes, figure in zip(part.subplots(1, len(row), squeeze=False)[0], row, strict=True):
            of = [one for one in results if one["figure"] == figure and not one.get("replicas")]
            OVER.get(figure, by_workers)(axes, of)
            axes.set_title(f"Figure {figure}, simulated", fontsize=10)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3)
    drawing.savefig(path, dpi=130)


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
    axes.set_xlabel("left of each link (GPT-Medium, 8 stages)", fontsize=9)
    axes.set_ylabel("throughput relative to k=1 on a quiet network", fontsize=9)
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
    axes.set_ylabel("samples/s, estimated by the tuner", fontsize=9)
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.35 * (high - low), high)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center")


def by_workers(axes: Axes, of: Sequence[dict[str, Any]]) -> None:
    """Throughput of each k over that of k = 1, pipelines below each other: full where links are whole, else open."""
    pipelines = list(dict.fromkeys((one["model"], one["workers"], one["platform"]) for one in of if one["workers"] > 1))
    parts = sorted({one["left"] for one in of}, reverse=True)
    for at, pipeline in enumerate(pipelines):
        for number, left in enumerate(parts):
            points = [one for one in of if (one["model"], one["workers"], one["platform"]) == pipeline]
            points = [one for one in points if one["left"] == left]
            for one in points:
                gain = 100 * (one["samples_per_second"] / points[0]["samples_per_second"] - 1)
                colour = COLOURS[one["k"] - 1]
                place = at + 0.36 * (number - (len(parts) - 1) / 2)
                axes.plot(gain, place, "o", ms=4.5, color=colour, markerfacecolor="white" if number else colour)
    labels = [f"{model} × {workers}, {platform}" for model, workers, platform in pipelines]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.4 * (high - low))  # room for the key
    axes.set_xlabel(f"% more samples/s than k=1\n(full: all of a link left, open: {parts[-1]:.4g})", fontsize=9)
    keys = [
        Line2D([], [], color="none", marker="o", ms=4.5, label=f"k={k}", markerfacecolor=COLOURS[k - 1],
               markeredgecolor=COLOURS[k - 1])
        for k in sorted({one["k"] for one in of})
    ]  # fmt: skip
    axes.legend(handles=keys, fontsize=8, loc="center right", borderpad=0.3, handletextpad=0.2, framealpha=0.8)


#: What is drawn otherwise than over workers.
OVER: Final[dict[str, Callable[[Axes, Sequence[dict[str, Any]]], None]]] = {"6": by_load, "10": by_hour}
