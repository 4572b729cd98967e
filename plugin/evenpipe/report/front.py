"""The Pareto front of memory against speed as a PNG: what else a little more or less memory would run."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from evenpipe.report.files import write_atomically

__all__ = ["Front", "Point", "draw_front"]

_TEXT, _QUIET, _CHOSEN, _OTHER, _LIMIT = "#2b2b2b", "#777777", "#2f6db5", "#b9cbe0", "#d1495b"
_NAMED = 16  # more points of the front than this have numbers alone
_PLAIN: Final[dict[str, Any]] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}  # behind a name


class Point(NamedTuple):
    """A run: GiB of its fullest stage, samples a second, and what it is called."""

    gib: float
    speed: float
    name: str


@dataclass(frozen=True)
class Front:
    """``front``: the fastest first. ``others``: runs beside it. ``limit``: GiB of a device."""

    title: str
    limit: float
    front: Sequence[Point]
    others: Sequence[Point]


def draw_front(path: str | os.PathLike[str], shown: Front) -> None:
    """Write a PNG: memory to the right, speed upwards, the front as steps, named below.

    OSError when ``path`` cannot be written.
    """
    from matplotlib.figure import Figure  # what may draw does not wait for it

    named = shown.front[:_NAMED]
    figure = Figure(figsize=(9, 4.6 + 0.24 * len(named)), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(shown.title, loc="left", fontsize=10, color=_TEXT)
    axes.set_xlabel("GiB of the fullest stage", fontsize=9, color=_TEXT)
    axes.set_ylabel("samples/s", fontsize=9, color=_TEXT)
    axes.axvline(shown.limit, color=_LIMIT, linewidth=1.4, label=f"device, {shown.limit:.4g} GiB")
    beside = [point for point in shown.others if (point.gib, point.speed) not in {one[:2] for one in shown.front}]
    if beside:
        axes.scatter(
            [one.gib for one in beside], [one.speed for one in beside], s=26, color=_OTHER, label="best of a schedule"
        )
    edge = shown.limit - 0.3 * (shown.limit - min(one.gib for one in (*shown.front, *beside)))
    for place, name in _named_together(beside, shown).items():
        left = place[0] > edge and not _numbered_beside(place, shown)
        offset, side = ((-6, -2), "right") if left else ((6, -2), "left")
        axes.annotate(name, place, offset, textcoords="offset points", ha=side, fontsize=7, color=_QUIET, bbox=_PLAIN)
    axes.step(
        [shown.limit, *(one.gib for one in shown.front)],
        [shown.front[0].speed, *(one.speed for one in shown.front)],
        where="pre",
        color=_CHOSEN,
        linewidth=1.2,
    )
    axes.scatter(
        [one.gib for one in shown.front],
        [one.speed for one in shown.front],
        s=44,
        color=_CHOSEN,
        zorder=3,
        label="front",
    )
    for number, point in enumerate(shown.front, 1):
        axes.annotate(str(number), point[:2], (0, 6), textcoords="offset points", ha="center", fontsize=7, color=_TEXT)
    speeds = [point.speed for point in (*shown.front, *beside)]
    # Not down to 0, where nothing is; below the slowest there is room for the legend.
    axes.set_ylim(max(0, min(speeds) - 0.6 * (max(speeds) - min(speeds)) - 0.1 * min(speeds)), 1.05 * max(speeds))
    axes.set_xlim(right=1.06 * shown.limit)
    axes.tick_params(labelsize=8, colors=_QUIET, length=0)
    axes.grid(color="#ececea", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.legend(facecolor="white", edgecolor="none", framealpha=0.9, fontsize=8, loc="lower left", labelcolor=_TEXT)
    lines = [
        f"{number}  {point.gib:.1f} GiB  {point.speed:.2f}/s  {point.name}" for number, point in enumerate(named, 1)
    ]
    figure.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=7.5, color=_TEXT)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def _numbered_beside(place: tuple[float, float], shown: Front) -> bool:
    """Whether a point of the front, with its number, is where a name to the left would be."""
    wide = shown.limit - min(point.gib for point in shown.front)
    high = max(point.speed for point in shown.front)
    return any(0 <= place[0] - at.gib < wide / 10 and abs(place[1] - at.speed) < high / 25 for at in shown.front)


def _named_together(points: Sequence[Point], shown: Front) -> dict[tuple[float, float], str]:
    """By place, the names of those that are too close to each other to be read apart."""
    wide = shown.limit - min(point.gib for point in (*shown.front, *points))
    high = max(point.speed for point in (*shown.front, *points))
    found: dict[tuple[float, float], str] = {}
    for point in points:
        close = (at for at in found if abs(at[0] - point.gib) < wide / 8 and abs(at[1] - point.speed) < high / 40)
        at = next(close, (point.gib, point.speed))
        found[at] = f"{found[at]}, {point.name}" if at in found else point.name
    return found
