"""The memory-limit curve over group size and micro-batch size as a PNG (Ada-Grouper, Figure 3)."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenpipe.report.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Limit", "draw_limit"]

_TEXT, _QUIET, _CHOSEN, _PRUNED, _TOO_MUCH = "#2b2b2b", "#777777", "#2f6db5", "#b9cbe0", "#d1495b"
_NAMED = 24  # more candidates than this have no room for their names


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
    from matplotlib.figure import Figure  # what may draw does not wait for it

    figure = Figure(figsize=(9, 5.4), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    _frame(axes, limit)
    _out_of_memory(axes, limit)
    _whole_batch(axes, limit)
    _points(axes, limit)
    axes.legend(facecolor="white", edgecolor="none", framealpha=0.9, fontsize=8, loc="upper right", labelcolor=_TEXT)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def _frame(axes: Axes, limit: Limit) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    sizes = sorted({b for _, b in limit.peaks})
    axes.set_title(limit.title, loc="left", fontsize=10, color=_TEXT)
    axes.set_xlabel("k: micro-batches in a group", fontsize=9, color=_TEXT)
    axes.set_ylabel("b: samples in a micro-batch", fontsize=9, color=_TEXT)
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
    axes.tick_params(labelsize=8, colors=_QUIET, length=0)
    axes.grid(color="#ececea", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


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
    axes.fill_between(ks, bs, top, color=_TOO_MUCH, alpha=0.10, linewidth=0, label="out of memory", zorder=0)
    axes.plot(ks, bs, color=_TOO_MUCH, linewidth=1.6, label=f"memory limit, {limit.limit:.4g} GiB", zorder=1)


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
        axes.scatter(*_columns(beyond), marker="x", s=18, linewidths=0.8, color=_TOO_MUCH, alpha=0.45, zorder=2)
    if fitting:
        axes.scatter(*_columns(fitting), s=22, color=_PRUNED, label="fits, pruned", zorder=2)
    axes.scatter(*_columns(chosen), s=46, color=_CHOSEN, label="candidate", zorder=3)
    if len(chosen) <= _NAMED:
        for k, b in chosen:
            axes.annotate(
                f"k{k}b{b}", (k, b), (0, -13), textcoords="offset points", ha="center", fontsize=7, color=_TEXT
            )


def _columns(points: Collection[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [k for k, _ in points], [b for _, b in points]
