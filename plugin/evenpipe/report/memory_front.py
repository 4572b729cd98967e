"""Memory against time as a picture: known schedules as points, what is searched as steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from evenpipe.report.figures import plain_axes, write_png
from evenpipe.simulate.front import Front, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_fronts"]

_TEXT, _QUIET, _KNOWN = "#2b2b2b", "#777777", "#e0a458"
_SEARCHED, _EVICTING = "#2f6db5", "#4a9a62"
_COLUMNS: Final = 2


def draw_fronts(path: str | os.PathLike[str], fronts: Mapping[str, Front]) -> None:
    """Write a PNG with a panel for each front: memory of 1F1B's to the right, share of the limit upwards.

    OSError when ``path`` cannot be written.
    """
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(fronts))
    rows = -(-len(fronts) // columns)
    figure = Figure(figsize=(7 * columns, 4.2 * rows), dpi=150, facecolor="white", layout="constrained")
    for at, (title, one) in enumerate(fronts.items(), 1):
        _panel(figure.add_subplot(rows, columns, at), title, one)
    write_png(path, figure)


def _panel(axes: Axes, title: str, front: Front) -> None:
    def place(point: Point) -> tuple[float, float]:
        return point.peak_bytes / front.base_bytes, front.limit_ms / point.batch_ms

    axes.set_title(title, loc="left", fontsize=10, color=_TEXT)
    axes.set_xlabel("saved activations of the fullest stage, 1 = 1F1B's", fontsize=8, color=_TEXT)
    axes.set_ylabel("speed, 1 = the busiest stage never waits", fontsize=8, color=_TEXT)
    right = max([1.3, *(place(one)[0] for one in front.searched)])
    known = {place(one): one.name for one in front.known if place(one)[0] <= right}
    for points, colour, name in (
        (front.searched, _SEARCHED, "searched"),
        (front.evicting, _EVICTING, "searched, straight, evicting"),
    ):
        levels = [place(one) for one in points]
        memory, speed = [level for level, _ in levels], [speed for _, speed in levels]
        if levels:
            axes.step([*memory, right], [*speed, *speed[-1:]], where="post", color=colour, linewidth=1.4, zorder=2)
            axes.scatter(memory, speed, s=30, color=colour, zorder=3, label=name)
    axes.scatter([at[0] for at in known], [at[1] for at in known], s=30, color=_KNOWN, zorder=3, label="known")
    for at, name in known.items():
        axes.annotate(name, at, (5, -9), textcoords="offset points", fontsize=7, color=_QUIET)
    axes.set_xlim(0.2, right)
    plain_axes(axes, 8, color="#ececea")
    axes.legend(facecolor="white", edgecolor="none", fontsize=8, loc="lower right", labelcolor=_TEXT)
