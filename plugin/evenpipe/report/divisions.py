"""How a model is divided into stages, one way beside another, as a PNG: time and memory of every stage."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from evenpipe.report.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Division", "draw_divisions"]

_GIB = 2**30
_TEXT, _QUIET, _LIMIT = "#2b2b2b", "#777777", "#d1495b"
_FORWARD, _BACKWARD, _EXTRA = "#8fb8de", "#3d6ea5", "#e0a458"
_HELD, _SAVED = "#5b7fa8", "#d6d6d0"
_WIDTH = 0.72
_NUMBERED = 10  # more stages than this have no room for numbers above their bars


class Division(NamedTuple):
    """One way to divide a model; each column has an entry a stage.

    ``extra_ms``: what recomputation and waiting for swaps add. ``peak_bytes_before``: without either.
    """

    title: str
    forward_ms: Sequence[float]
    backward_ms: Sequence[float]
    extra_ms: Sequence[float]
    peak_bytes: Sequence[int]
    peak_bytes_before: Sequence[int]

    @property
    def total_ms(self) -> list[float]:
        """What a micro-batch takes on each stage."""
        return [sum(parts) for parts in zip(self.forward_ms, self.backward_ms, self.extra_ms, strict=True)]


def draw_divisions(
    path: str | os.PathLike[str], title: str, divisions: Sequence[Division], limit_gib: float | None = None
) -> None:
    """Write a PNG: a column for each division, times above and peaks below, on one scale each.

    OSError when ``path`` cannot be written.
    """
    from matplotlib.figure import Figure  # what may draw does not wait for it

    figure = Figure(figsize=(3.4 * len(divisions) + 0.6, 5.6), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=_TEXT)
    rows = figure.subplots(2, len(divisions), sharey="row", squeeze=False)
    for column, division in enumerate(divisions):
        _times(rows[0][column], division)
        _peaks(rows[1][column], division, limit_gib)
        rows[0][column].set_title(
            f"{division.title}: slowest {max(division.total_ms):,.4g} ms", loc="left", fontsize=9, color=_TEXT
        )
        rows[1][column].set_xlabel("stage", fontsize=8, color=_TEXT)
    rows[0][0].set_ylabel("ms a micro-batch", fontsize=8, color=_TEXT)
    rows[1][0].set_ylabel("peak GiB", fontsize=8, color=_TEXT)
    for axes in rows[:, 0]:
        axes.set_ylim(0, 1.32 * axes.get_ylim()[1])  # room for the legend
        axes.legend(frameon=False, fontsize=7, loc="upper left", ncols=3, labelcolor=_TEXT, columnspacing=1.0)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def _times(axes: Axes, division: Division) -> None:
    stages = range(len(division.forward_ms))
    floor = [0.0] * len(stages)
    series = {
        "forward": (division.forward_ms, _FORWARD),
        "backward": (division.backward_ms, _BACKWARD),
        "recompute, swap": (division.extra_ms, _EXTRA),
    }
    for label, (values, colour) in series.items():
        axes.bar(stages, values, _WIDTH, bottom=floor, color=colour, label=label, zorder=2)
        floor = [low + value for low, value in zip(floor, values, strict=True)]
    _finish(axes, division.total_ms)


def _peaks(axes: Axes, division: Division, limit_gib: float | None) -> None:
    stages = range(len(division.peak_bytes))
    before, held = ([nbytes / _GIB for nbytes in row] for row in (division.peak_bytes_before, division.peak_bytes))
    axes.bar(stages, before, _WIDTH, color=_SAVED, label="before", zorder=2)
    axes.bar(stages, held, _WIDTH, color=_HELD, label="peak", zorder=3)
    if limit_gib is not None:
        axes.axhline(limit_gib, color=_LIMIT, linewidth=1.2, label=f"limit {limit_gib:.4g} GiB", zorder=4)
    _finish(axes, held, inside=True)


def _finish(axes: Axes, tops: Sequence[float], inside: bool = False) -> None:
    """Each bar's number above its top, or inside of it, where a line or another bar may be above."""
    from matplotlib.ticker import MaxNLocator

    if len(tops) <= _NUMBERED:
        colour, offset = ("white", -9) if inside else (_TEXT, 1)
        for stage, top in enumerate(tops):
            number = axes.annotate(f"{top:.4g}", (stage, top), (0, offset), textcoords="offset points", ha="center")
            number.set(fontsize=6, color=colour, zorder=5)
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    axes.tick_params(labelsize=7, colors=_QUIET, length=0)
    axes.grid(axis="y", color="#e6e6e2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
