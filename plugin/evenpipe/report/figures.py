"""Divisions of a model, the memory-limit curve and the Pareto front of plans as PNGs."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from evenpipe.report.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from evenpipe.simulate.front import Front as MemoryFront

__all__ = [
    "Division",
    "Front",
    "Limit",
    "Point",
    "draw_divisions",
    "draw_front",
    "draw_fronts",
    "draw_limit",
    "plain_axes",
    "write_png",
]

_GIB = 2**30
_TEXT, _QUIET, _LIMIT, _CHOSEN, _OTHER = "#2b2b2b", "#777777", "#d1495b", "#2f6db5", "#b9cbe0"
_FORWARD, _BACKWARD, _EXTRA = "#8fb8de", "#3d6ea5", "#e0a458"
_HELD, _SAVED, _EVICTING = "#5b7fa8", "#d6d6d0", "#4a9a62"
_WIDTH = 0.72
# Beyond these there is no room for numbers above bars, and for names of a front's points and of candidates.
_NUMBERED_STAGES, _NAMED_POINTS, _NAMED_CANDIDATES = 10, 16, 24
_PLAIN: Final[dict[str, Any]] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}  # behind a name


def write_png(path: str | os.PathLike[str], figure: Figure, **options: Any) -> None:
    """Write the figure as a whole or not at all. Raises OSError."""
    image = io.BytesIO()
    figure.savefig(image, format="png", **options)
    write_atomically(path, image.getvalue())


def _page(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # what may draw does not wait for it

    return Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")


def plain_axes(axes: Axes, label_pt: int, **grid: Any) -> None:
    """A grid behind what is drawn, and no frame around it."""
    axes.tick_params(labelsize=label_pt, colors=_QUIET, length=0)
    axes.grid(linewidth=0.6, **grid)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _title(axes: Axes, title: str, x: str, y: str, size_pt: int = 9) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_TEXT)
    axes.set_xlabel(x, fontsize=size_pt, color=_TEXT)
    axes.set_ylabel(y, fontsize=size_pt, color=_TEXT)


def _legend(axes: Axes, where: Literal["lower left", "lower right", "upper right"], **options: Any) -> None:
    axes.legend(facecolor="white", edgecolor="none", fontsize=8, loc=where, labelcolor=_TEXT, **options)


def _note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int], **options: Any) -> None:
    """Write a text so many points from a place."""
    axes.annotate(text, at, offset, textcoords="offset points", **{"fontsize": 7, "color": _TEXT, **options})


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
        """Return the milliseconds that a micro-batch takes on each stage."""
        return [sum(parts) for parts in zip(self.forward_ms, self.backward_ms, self.extra_ms, strict=True)]


def draw_divisions(
    path: str | os.PathLike[str], title: str, divisions: Sequence[Division], limit_gib: float | None = None
) -> None:
    """Write a PNG: a column for each division, times above and peaks below, on one scale each.

    OSError when ``path`` cannot be written.
    """
    figure = _page(3.4 * len(divisions) + 0.6, 5.6)
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
    write_png(path, figure)


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

    if len(tops) <= _NUMBERED_STAGES:
        colour, offset = ("white", -9) if inside else (_TEXT, 1)
        for stage, top in enumerate(tops):
            _note(axes, f"{top:.4g}", (stage, top), (0, offset), ha="center", fontsize=6, color=colour, zorder=5)
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    plain_axes(axes, 7, axis="y", color="#e6e6e2")


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

    named = shown.front[:_NAMED_POINTS]
    figure = _page(9, 4.6 + 0.24 * len(named))
    axes = figure.add_subplot()
    _title(axes, shown.title, "GiB of the fullest stage", "samples/s")
    axes.axvline(shown.limit, color=_LIMIT, linewidth=1.4, label=f"device, {shown.limit:.4g} GiB")
    beside = [point for point in shown.others if (point.gib, point.speed) not in {one[:2] for one in shown.front}]
    if beside:
        axes.scatter(*_columns(beside), s=26, color=_OTHER, label="best of a schedule")
    edge = shown.limit - 0.3 * (shown.limit - min(one.gib for one in (*shown.front, *beside)))
    for place, name in _named_together(beside, shown).items():
        left = place[0] > edge and not _numbered_beside(place, shown)
        offset, side = ((-6, -2), "right") if left else ((6, -2), "left")
        _note(axes, name, place, offset, ha=side, color=_QUIET, bbox=_PLAIN)
    memory, speed = _columns(shown.front)
    axes.step([shown.limit, *memory], [speed[0], *speed], where="pre", color=_CHOSEN, linewidth=1.2)
    axes.scatter(memory, speed, s=44, color=_CHOSEN, zorder=3, label="front")
    for number, point in enumerate(shown.front, 1):
        _note(axes, str(number), point[:2], (0, 6), ha="center")
    speeds = [point.speed for point in (*shown.front, *beside)]
    # Not down to 0, where nothing is; below the slowest there is room for the legend.
    axes.set_ylim(max(0, min(speeds) - 0.6 * (max(speeds) - min(speeds)) - 0.1 * min(speeds)), 1.05 * max(speeds))
    axes.set_xlim(right=1.06 * shown.limit)
    plain_axes(axes, 8, color="#ececea")
    _legend(axes, "lower left", framealpha=0.9)
    lines = [
        f"{number}  {point.gib:.1f} GiB  {point.speed:.2f}/s  {point.name}" for number, point in enumerate(named, 1)
    ]
    figure.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=7.5, color=_TEXT)
    write_png(path, figure)


def _numbered_beside(place: tuple[float, float], shown: Front) -> bool:
    """Return whether a point of the front, with its number, is where a name to the left would be."""
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


@dataclass(frozen=True)
class Limit:
    """Points (k, b) with the peak of their fullest stage, and the limit for it, both in GiB.

    ``candidates`` are those on the curve, one for each k from 1 up. A group has at most the ``samples`` of a batch.
    """

    title: str
    samples: int
    peaks: Mapping[tuple[int, int], float]
    limit: float
    candidates: Collection[tuple[int, int]]

    def crossings(self) -> list[tuple[float, float]]:
        """For each k the b at which memory runs out, between two sizes as their peaks say; without those that all fit.

        Below the smallest size, b falls as its peak exceeds the limit.
        """
        crossings = []
        for k in sorted({k for k, _ in self.peaks}):
            column = sorted((b, peak) for (at, b), peak in self.peaks.items() if at == k)
            over = [(b, peak) for b, peak in column if b > self._largest(k) and peak > self.limit]
            if not over:
                continue
            b, peak = over[0]
            below = (self._largest(k), self.peaks[k, self._largest(k)]) if self._largest(k) else (0.0, 0.0)
            share = (self.limit - below[1]) / (peak - below[1])
            crossings.append((float(k), below[0] + share * (b - below[0])))
        return crossings

    def _largest(self, k: int) -> int:
        return max((b for at, b in self.candidates if at == k), default=0)


def draw_limit(path: str | os.PathLike[str], limit: Limit) -> None:
    """Write a PNG: k to the right, b upwards; what fits, what is chosen of it, and where memory runs out.

    OSError when ``path`` cannot be written.
    """
    figure = _page(9, 5.4)
    axes = figure.add_subplot()
    _frame(axes, limit)
    _out_of_memory(axes, limit)
    _whole_batch(axes, limit)
    _points(axes, limit)
    _legend(axes, "upper right", framealpha=0.9)
    write_png(path, figure)


def _frame(axes: Axes, limit: Limit) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    sizes = sorted({b for _, b in limit.peaks})
    _title(axes, limit.title, "k: micro-batches in a group", "b: samples in a micro-batch")
    axes.set_xlim(0.4, max(k for k, _ in limit.peaks) + 0.6)
    axes.set_yscale("log", base=2)
    axes.set_ylim(sizes[0] / 1.6, sizes[-1] * 1.6)
    shown = [sizes[0]]
    for size in sizes[1:]:
        if size >= 1.25 * shown[-1]:
            shown.append(size)
    axes.set_yticks(shown, [str(size) for size in shown])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    plain_axes(axes, 8, color="#ececea")


def _out_of_memory(axes: Axes, limit: Limit) -> None:
    """The curve, and all above it."""
    curve = limit.crossings()
    if not curve:
        return
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    # What is out of the picture ends at its edge.
    ends = [(left if curve[0][0] == 1 else curve[0][0], curve[0][1]), *curve, (right, curve[-1][1])]
    ks, bs = zip(*((k, max(b, bottom)) for k, b in ends), strict=True)
    axes.fill_between(ks, bs, top, color=_LIMIT, alpha=0.10, linewidth=0, label="out of memory", zorder=0)
    axes.plot(ks, bs, color=_LIMIT, linewidth=1.6, label=f"memory limit, {limit.limit:.4g} GiB", zorder=1)


def _whole_batch(axes: Axes, limit: Limit) -> None:
    """Where a group is the whole batch, beyond which there is nothing."""
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    nearest, furthest = max(left, limit.samples / top), min(right, limit.samples / bottom)
    if nearest >= furthest:
        return
    ks = [nearest * (furthest / nearest) ** (step / 100) for step in range(101)]
    bs = [limit.samples / k for k in ks]
    axes.plot(ks, bs, color=_QUIET, linewidth=1, linestyle="--", label="k · b is the whole batch", zorder=1)


def _points(axes: Axes, limit: Limit) -> None:
    chosen = sorted(limit.candidates)
    possible = {(k, b): peak for (k, b), peak in limit.peaks.items() if k * b <= limit.samples}
    fitting = [point for point, peak in possible.items() if peak <= limit.limit and point not in limit.candidates]
    beyond = [point for point, peak in possible.items() if peak > limit.limit]
    if beyond:
        axes.scatter(*_columns(beyond), marker="x", s=18, linewidths=0.8, color=_LIMIT, alpha=0.45, zorder=2)
    if fitting:
        axes.scatter(*_columns(fitting), s=22, color=_OTHER, label="fits, pruned", zorder=2)
    axes.scatter(*_columns(chosen), s=46, color=_CHOSEN, label="candidate", zorder=3)
    if len(chosen) <= _NAMED_CANDIDATES:
        for k, b in chosen:
            _note(axes, f"k{k}b{b}", (k, b), (0, -13), ha="center")


def _columns(points: Collection[Sequence[Any]]) -> tuple[list[float], list[float]]:
    """Return where the points are to the right, and upwards."""
    return [point[0] for point in points], [point[1] for point in points]


def draw_fronts(path: str | os.PathLike[str], fronts: Mapping[str, MemoryFront]) -> None:
    """Write a PNG with a panel for each front of memory against time: memory of 1F1B's, share of the fastest.

    Known schedules are points, and what is searched is steps. OSError when ``path`` cannot be written.
    """
    columns = min(2, len(fronts))
    rows = -(-len(fronts) // columns)
    figure = _page(7 * columns, 4.2 * rows)
    for at, (title, one) in enumerate(fronts.items(), 1):
        _front_panel(figure.add_subplot(rows, columns, at), title, one)
    write_png(path, figure)


def _front_panel(axes: Axes, title: str, front: MemoryFront) -> None:
    known, searched, evicting = (
        [(one.peak_bytes / front.base_bytes, front.limit_ms / one.batch_ms, one.name) for one in points]
        for points in (front.known, front.searched, front.evicting)
    )
    _title(
        axes,
        title,
        "saved activations of the fullest stage, 1 = 1F1B's",
        "speed, 1 = the busiest stage never waits",
        size_pt=8,
    )
    right = max([1.3, *_columns(searched)[0]])
    for points, colour, name in (
        (searched, _CHOSEN, "searched"),
        (evicting, _EVICTING, "searched, straight, evicting"),
    ):
        memory, speed = _columns(points)
        if points:
            axes.step([*memory, right], [*speed, *speed[-1:]], where="post", color=colour, linewidth=1.4, zorder=2)
            axes.scatter(memory, speed, s=30, color=colour, zorder=3, label=name)
    names = {(memory, speed): name for memory, speed, name in known if memory <= right}
    axes.scatter(*_columns(names), s=30, color=_EXTRA, zorder=3, label="known")
    for place, name in names.items():
        _note(axes, name, place, (5, -9), color=_QUIET)
    axes.set_xlim(0.2, right)
    plain_axes(axes, 8, color="#ececea")
    _legend(axes, "lower right")
