"""What each stage needs of its device, beside what it does in an iteration, as a PNG."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evenpipe.report.files import write_atomically
from evenpipe.report.picture import draw_boxes
from evenpipe.report.timeline import Timeline
from evenpipe.schedule import KINDS

__all__ = ["draw_stages"]

_DPI: Final = 100
_WIDTH, _LEFT, _BETWEEN, _RIGHT = 11.0, 0.55, 0.2, 0.15
_BARS: Final = 2.9
_HEAD, _FOOT = 0.6, 0.42
_ROW, _LEAST, _MOST = 0.3, 0.9, 5.0
_COLOURS: Final = ("#b9b9b2", "#5b7fa8", "#d6d6d0")
_TEXT, _QUIET, _TOO_MUCH = "#2b2b2b", "#777777", "#d1495b"


def draw_stages(
    path: str | os.PathLike[str], title: str, parts: Mapping[str, Sequence[float]], limit_gib: float, timeline: Timeline
) -> None:
    """``parts``: GiB of each stage by what they are for. OSError when ``path`` cannot be written."""
    stages = len(timeline.stages)
    body = min(max(_ROW * stages, _LEAST), _MOST)
    height = _HEAD + body + _FOOT
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    figure.text(_LEFT / _WIDTH, 1 - 0.12 / height, title, ha="left", va="top", fontsize=9.5, color=_TEXT)
    across = _WIDTH - _LEFT - _BARS - _BETWEEN - _RIGHT
    bars = figure.add_axes((_LEFT / _WIDTH, _FOOT / height, _BARS / _WIDTH, body / height))
    _draw_bars(bars, parts, limit_gib, stages)
    boxes = figure.add_axes(((_LEFT + _BARS + _BETWEEN) / _WIDTH, _FOOT / height, across / _WIDTH, body / height))
    draw_boxes(boxes, timeline, timeline.duration_ms)
    boxes.set_title("", loc="left")
    boxes.set_yticks([])
    boxes.set_xlabel("ms", fontsize=7, color=_QUIET, labelpad=1)
    present = {span.action.kind for row in timeline.stages for span in row}
    kinds = {row.name: Patch(color=row.colour) for kind, row in KINDS.items() if kind in present}
    memory = {name: Patch(color=colour) for name, colour in zip(parts, _COLOURS, strict=False)}
    for entries, left in ((memory, _LEFT), (kinds, _LEFT + _BARS + _BETWEEN)):
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="lower left",
            bbox_to_anchor=(left / _WIDTH, 1 - (_HEAD - 0.05) / height),
            ncols=len(entries),
            frameon=False,
            fontsize=6.5,
            borderaxespad=0,
            handlelength=1.0,
            handleheight=0.8,
            columnspacing=0.8,
            handletextpad=0.4,
        )
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    write_atomically(path, image.getvalue())


def _draw_bars(axes: Axes, parts: Mapping[str, Sequence[float]], limit_gib: float, stages: int) -> None:
    """A row a stage, as the timeline has it."""
    left = [0.0] * stages
    for values, colour in zip(parts.values(), _COLOURS, strict=False):
        axes.barh([row + 0.45 for row in range(stages)], values, 0.72, left, color=colour, zorder=2)
        left = [start + value for start, value in zip(left, values, strict=True)]
    highest = max(*left, limit_gib)
    axes.set_xlim(0, 1.12 * highest)
    axes.set_ylim(stages, 0)
    axes.axvline(limit_gib, color=_TOO_MUCH, linewidth=1.0, zorder=3)
    if stages <= 24:
        for row, total in enumerate(left):
            axes.text(total + 0.01 * highest, row + 0.45, f"{total:.1f}", va="center", fontsize=6, color=_QUIET)
    every = -(-stages // 16)
    axes.set_yticks([row + 0.45 for row in range(0, stages, every)], [f"{row}" for row in range(0, stages, every)])
    axes.tick_params(labelsize=7, colors=_QUIET, length=0)
    axes.set_ylabel("stage", fontsize=7, color=_QUIET)
    axes.set_xlabel(f"GiB, of {limit_gib:g}", fontsize=7, color=_QUIET, labelpad=1)
    axes.grid(axis="x", color="#e6e6e2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
