"""One timeline drawn on given axes: a row a stage, compute as boxes, updates as ticks, transfers as thin bars below."""

from __future__ import annotations

import math
from collections import defaultdict
from colorsys import hsv_to_rgb, rgb_to_hsv

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from evenpipe.report.timeline import Timeline
from evenpipe.schedule import COMPUTE, DEPARTING, KINDS, UPDATE, Action, Kind

__all__ = ["draw_boxes", "shade"]

# A stage's row is 1 high: the boxes of its compute, below them two lanes, for what leaves and for what arrives.
_BOX = (0.06, 0.62)
_TICK = (0.0, 0.74)  # stands out above and below the boxes that it separates
_LEAVING = (0.73, 0.09)
_ARRIVING = (0.85, 0.09)
_TEXT, _QUIET = "#2b2b2b", "#777777"
_FONT_PT, _CHARACTER_EM = 7.0, 0.62
_EDGE_FROM_PX = 4.0
_TICK_PT = (0.3, 1.8)  # an update may take no time at all; its tick is no wider than a box, lest it hide one


def draw_boxes(axes: Axes, timeline: Timeline, duration_ms: float) -> None:
    """Draw ``timeline`` on a time axis of ``duration_ms``; a number is written where its box is large enough.

    Boxes of later model chunks, and of every second weight version, are in a fuller colour.
    """
    stages = len(timeline.stages)
    axes.set_xlim(0, duration_ms or 1)
    axes.set_ylim(stages, 0)
    _dress(axes, timeline)
    box = axes.get_window_extent()
    px_per_ms, row_px = box.width / (duration_ms or 1), box.height / stages
    points_to_px = axes.figure.dpi / 72
    character_px = _CHARACTER_EM * _FONT_PT * points_to_px
    tall_enough = _BOX[1] * row_px >= 1.1 * _FONT_PT * points_to_px

    spans = [(stage, *span) for stage, row in enumerate(timeline.stages) for span in row]
    chunks = 1 + max((action.chunk for _, action, _, _ in spans), default=0)
    shapes: dict[tuple[Kind, int], list[list[tuple[float, float]]]] = defaultdict(list)
    narrowest_px = math.inf
    for stage, action, start, end in spans:
        top, height = _place(action)
        low, high = stage + top, stage + top + height
        level = timeline.version(action) % 2 if chunks == 1 and action.kind in COMPUTE else action.chunk
        shapes[action.kind, level].append([(start, low), (end, low), (end, high), (start, high)])
        if action.kind not in COMPUTE:
            continue
        width_px = (end - start) * px_per_ms
        narrowest_px = min(narrowest_px, width_px)
        label = str(action.micro_batch)
        if tall_enough and width_px > (len(label) + 0.5) * character_px:
            middle = (start + end) / 2, (low + high) / 2
            axes.text(*middle, label, ha="center", va="center_baseline", fontsize=_FONT_PT, color=_TEXT)
    tick_pt = max(_TICK_PT[0], min(_TICK_PT[1], narrowest_px / points_to_px))
    for (kind, level), polygons in shapes.items():
        separated = kind in COMPUTE and narrowest_px > _EDGE_FROM_PX
        colour = shade(kind, level / max(1, chunks - 1))
        boxes = PolyCollection(
            polygons,
            facecolors=colour,
            edgecolors=colour if kind == UPDATE else "white",
            linewidths=tick_pt if kind == UPDATE else 0.6 if separated else 0.0,
            zorder=3 if kind == UPDATE else 2,
        )
        axes.add_collection(boxes, autolim=False)


def _place(action: Action) -> tuple[float, float]:
    """(top, height) of an action's box within its stage's row."""
    if action.kind in COMPUTE:
        return _BOX
    if action.kind == UPDATE:
        return _TICK
    return _LEAVING if action.kind in DEPARTING else _ARRIVING


def shade(kind: Kind, fullness: float) -> tuple[float, float, float]:
    """The kind's colour, made fuller by up to 1."""
    hue, saturation, value = rgb_to_hsv(*to_rgb(KINDS[kind].colour))
    return hsv_to_rgb(hue, saturation * (1 + 0.7 * fullness), value * (1 - 0.1 * fullness))


def _dress(axes: Axes, timeline: Timeline) -> None:
    stages = len(timeline.stages)
    axes.set_title(f"{timeline.title}   {_rounded(timeline.duration_ms)} ms", loc="left", fontsize=10, color=_TEXT)
    step = -(-stages // 32)
    axes.set_yticks([stage + 0.4 for stage in range(0, stages, step)])
    axes.set_yticklabels([f"stage {stage}" for stage in range(0, stages, step)], fontsize=8, color=_TEXT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7, colors=_QUIET, length=2)
    axes.spines[:].set_visible(False)
    axes.set_facecolor("#f6f6f4")


def _rounded(ms: float) -> str:
    """To three digits, or to whole milliseconds."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
