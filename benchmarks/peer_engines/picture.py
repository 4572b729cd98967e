"""Memory of the worst stage against throughput, a panel for each pipeline, with a number for each schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

__all__ = ["case_of", "draw", "uneven"]

_COLOURS: Final = {"Megatron": "#4f7d00", "torch": "#de3412", "DeepSpeed": "#7a5195", "EvenPipe": "#1f5fbf"}
_MARKS: Final = {"Megatron": "s", "torch": "^", "DeepSpeed": "D", "EvenPipe": "o"}
_FRONT: Final = "#a5a59d"
#: A panel's width and height within its axes, a number's width per character and its height, and a mark, in points.
_WIDE, _HIGH, _CHARACTER, _LINE, _MARK = 200.0, 225.0, 3.8, 8.0, 3.0
_Box = tuple[float, float, float, float]  # left, bottom, right, top


def draw(path: Path, results: list[dict[str, Any]]) -> None:
    """As PNG. A line joins what nothing that trains by the stock rule beats in both."""
    cases = [list(rows) for _, rows in itertools.groupby(results, key=case_of)]
    numbers = {peer: at for at, peer in enumerate(dict.fromkeys(row["peer"] for row in results), 1)}
    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    figure = Figure(figsize=(max(3.3 * columns, 6.6), 3.9 * lines + 1.9), dpi=140, layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for axes, rows in zip(panels, cases, strict=False):
        _panel(axes, rows)
    bottom, top = min(row["of_limit"] for row in results) - 0.03, 1.02
    panels[0].set_ylim(bottom, top)
    for axes, rows in zip(panels, cases, strict=False):
        _number(axes, rows, numbers)
    for axes in panels[len(cases) :]:
        axes.set_axis_off()
    for axes in panels[::columns]:
        axes.set_ylabel("throughput, of the limit without bubbles", fontsize=9)
    delayed = {row["engine"] for row in results if row["delayed"]}
    keys = [Line2D([], [], color=_FRONT, linewidth=1.4, label="front of the stock rule")]
    keys += [Line2D([], [], color="none", marker=_MARKS[one], markerfacecolor="white", markeredgecolor=_COLOURS[one],
                    label="gradients a batch late") for one in sorted(delayed)]  # fmt: skip
    keys += [
        Line2D([], [], color="none", marker=_MARKS[peer.partition(": ")[0]], label=f"{number}  {peer}",
               markerfacecolor=_COLOURS[peer.partition(": ")[0]], markeredgecolor=_COLOURS[peer.partition(": ")[0]])
        for peer, number in numbers.items()
    ]  # fmt: skip
    figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    figure.savefig(path)


def case_of(row: dict[str, Any]) -> tuple[int, int, bool]:
    """The pipeline that a row is of; rows of one stand together."""
    return row["stages"], row["micro_batches"], "uneven" in row


def uneven(row: dict[str, Any]) -> str:
    """Behind the pipeline's sizes."""
    return ", uneven" if "uneven" in row else ""


def _panel(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """The points of one pipeline and the line through its front."""
    least, most = (extreme(row["mib"] for row in rows) for extreme in (min, max))
    front = sorted((row["mib"], row["of_limit"]) for row in rows if row["front"] and not row["delayed"])
    axes.step(*zip(*front, strict=True), where="post", color=_FRONT, linewidth=1.4, zorder=1)
    for row in rows:
        colour = _COLOURS[row["engine"]]
        axes.scatter(
            [row["mib"]],
            [row["of_limit"]],
            s=22,
            facecolors="white" if row["delayed"] else colour,
            edgecolors=colour,
            marker=_MARKS[row["engine"]],
            zorder=2,
        )
    stages, micro_batches, _ = case_of(rows[0])
    axes.set_title(f"p = {stages}, m = {micro_batches}{uneven(rows[0])}", loc="left", fontsize=10)
    axes.set_xlabel("saved by the worst stage, MiB (logarithmic)", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({least, *(mib for mib in (stages * 2**n for n in range(4)) if mib <= most)}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(0.68 * least, max(1.35 * most, 3.6 * least))
    axes.grid(color="#e6e6e2", linewidth=0.6)
    axes.tick_params(labelsize=8, length=0)
    axes.spines[:].set_visible(False)


def _number(axes: Axes, rows: Sequence[dict[str, Any]], numbers: dict[str, int]) -> None:
    """Each point's number beside it; of points that lie over each other all of them, the highest first."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()

    def place(row: dict[str, Any]) -> tuple[float, float]:
        across = math.log(row["mib"] / left) / math.log(right / left)
        return _WIDE * across, _HIGH * (row["of_limit"] - bottom) / (top - bottom)

    taken = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in map(place, rows)]
    front = sorted(place(row) for row in rows if row["front"] and not row["delayed"])
    taken += [(x, y - 0.5, beyond, y + 0.5) for (x, y), (beyond, _) in itertools.pairwise(front)]
    taken += [(x - 0.5, y, x + 0.5, above) for (_, y), (x, above) in itertools.pairwise(front)]
    for group in _together(rows, place):
        text = ", ".join(str(numbers[row["peer"]]) for row in group)
        x, y = place(group[0])[0], sum(place(row)[1] for row in group) / len(group)
        wide = _CHARACTER * len(text)
        sides = [(x + 6 + wide / 2, y), (x - 6 - wide / 2, y)]
        sides += [(x + 6 + wide / 2, y + up) for up in (4, -4, 8, -8)]
        sides += [(x - 6 - wide / 2, y + up) for up in (4, -4, 8, -8)]
        sides += [(x + beside, y + up) for up in (10, -10, 15, -15, 20, -20) for beside in (0, wide / 2, -wide / 2)]
        boxes = [(u - wide / 2, v - _LINE / 2, u + wide / 2, v + _LINE / 2) for u, v in sides]
        box = min(boxes, key=lambda one: sum(_overlap(one, other) for other in taken) + _WIDE * (one[0] < 0))
        taken.append(box)
        axes.annotate(
            text,
            ((box[0] + box[2]) / 2 / _WIDE, (box[1] + box[3]) / 2 / _HIGH),
            xycoords="axes fraction",
            ha="center",
            va="center",
            fontsize=7.5,
            color=_COLOURS[group[0]["engine"]] if len({row["engine"] for row in group}) == 1 else "#333333",
        )


def _together(rows: Sequence[dict[str, Any]], place: Callable[[dict[str, Any]], tuple[float, float]]) -> Iterator[Any]:
    """Points of one memory of which each is nearly as high as the one before, the highest first."""
    group: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["mib"], -row["of_limit"])):
        if group and (row["mib"] != group[-1]["mib"] or place(group[-1])[1] - place(row)[1] > _LINE - 2):
            yield group
            group = []
        group.append(row)
    yield group


def _overlap(one: _Box, other: _Box) -> float:
    """Their common area, in square points."""
    wide, high = (min(one[2 + at], other[2 + at]) - max(one[at], other[at]) for at in (0, 1))
    return max(wide, 0) * max(high, 0)
