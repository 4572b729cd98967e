"""Timelines and per-stage memory as one PNG."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from colorsys import hsv_to_rgb, rgb_to_hsv
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from evenpipe.report.figures import write_png
from evenpipe.report.timeline import StageMemory, Timeline, lane_of
from evenpipe.schedule import BACKWARD, COMPUTE, FORWARD, KINDS, UPDATE, Kind

__all__ = ["draw_boxes", "draw_comparison", "draw_memory", "shade"]

_PREDICTED, _MEASURED = "#d6d6d0", "#5b7fa8"
_TEXT, _QUIET = "#2b2b2b", "#777777"
_BAR_PT, _BOX_PT, _CHARACTER_EM = 6.5, 7.0, 0.62
_WIDEST_PX = 70.0


def draw_memory(axes: Axes, memory: StageMemory, highest: float, scale: bool) -> None:
    """Bars of ``memory`` on an axis that ends above ``highest``; ``scale`` writes the unit and numbers on it."""
    stages = range(len(memory.predicted))
    series = [("predicted", memory.predicted, _PREDICTED)]
    if memory.measured is not None:
        series.append(("measured", memory.measured, _MEASURED))
    axes.set_xlim(-0.6, len(stages) - 0.4)
    axes.set_ylim(0, (1.3 if len(series) > 1 else 1.15) * highest or 1)
    stage_px = axes.get_window_extent().width / (len(stages) + 0.2)
    width = min(0.76 / len(series), _WIDEST_PX / stage_px)
    character_px = _CHARACTER_EM * _BAR_PT * axes.figure.dpi / 72
    for index, (label, values, colour) in enumerate(series):
        places = [stage + (index - (len(series) - 1) / 2) * width for stage in stages]
        bars = axes.bar(places, values, width * 0.94, color=colour, label=label, zorder=2)
        if width * stage_px > 4 * character_px:
            axes.bar_label(bars, fmt="{:.4g}", fontsize=_BAR_PT, color=_TEXT, padding=1)
    axes.set_title(memory.title, loc="left", fontsize=9, color=_TEXT)
    every = -(-len(stages) // 16)
    name = "stage {}" if stage_px > 8 * character_px else "{}"
    axes.set_xticks(stages[::every], [name.format(stage) for stage in stages[::every]])
    axes.tick_params(labelsize=7, colors=_QUIET, length=0, labelleft=scale)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="#e6e6e2", linewidth=0.6)
    axes.set_axisbelow(True)
    if scale:
        axes.set_ylabel(f"peak {memory.unit}", fontsize=8, color=_TEXT)
    if scale and len(series) > 1:
        axes.legend(frameon=False, fontsize=7, loc="upper right", ncols=2, borderaxespad=0.1)
    axes.spines[:].set_visible(False)


# A stage's row is 1 high: (top, height) of the boxes of its compute, and below them two lanes, for what leaves and for
# what arrives. An update stands out above and below the boxes that it separates.
_LANES = {"compute": (0.06, 0.62), "update": (0.0, 0.74), "leaving": (0.73, 0.09), "arriving": (0.85, 0.09)}
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
    character_px = _CHARACTER_EM * _BOX_PT * points_to_px
    tall_enough = _LANES["compute"][1] * row_px >= 1.1 * _BOX_PT * points_to_px

    spans = [(stage, *span) for stage, row in enumerate(timeline.stages) for span in row]
    chunks = 1 + max((action.chunk for _, action, _, _ in spans), default=0)
    shapes: dict[tuple[Kind, int], list[list[tuple[float, float]]]] = defaultdict(list)
    narrowest_px = math.inf
    for stage, action, start, end in spans:
        top, height = _LANES[lane_of(action)]
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
            axes.text(*middle, label, ha="center", va="center_baseline", fontsize=_BOX_PT, color=_TEXT)
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


def shade(kind: Kind, fullness: float) -> tuple[float, float, float]:
    """Return the kind's colour, made fuller by up to 1."""
    hue, saturation, value = rgb_to_hsv(*to_rgb(KINDS[kind].colour))
    return hsv_to_rgb(hue, saturation * (1 + 0.7 * fullness), value * (1 - 0.1 * fullness))


def _dress(axes: Axes, timeline: Timeline) -> None:
    stages, ms = len(timeline.stages), timeline.duration_ms
    took = f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
    axes.set_title(f"{timeline.title}   {took} ms", loc="left", fontsize=10, color=_TEXT)
    step = -(-stages // 32)
    axes.set_yticks([stage + 0.4 for stage in range(0, stages, step)])
    axes.set_yticklabels([f"stage {stage}" for stage in range(0, stages, step)], fontsize=8, color=_TEXT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7, colors=_QUIET, length=2)
    axes.spines[:].set_visible(False)
    axes.set_facecolor("#f6f6f4")


_DPI = 150
# The page in inches: panels of fixed size under each other, so that what fits into a box is known before drawing.
_WIDTH, _LEFT, _RIGHT = 14.0, 0.85, 0.25
_HEAD, _TITLE, _AXIS = 0.08, 0.36, 0.34
_ROW, _TALLEST = 0.42, 9.0
_BARS, _GAP = 1.9, 0.3


def draw_comparison(
    path: str | os.PathLike[str], timelines: Sequence[Timeline], memory: Sequence[StageMemory] = ()
) -> None:
    """Write a PNG of timelines, stacked on one time scale, and below them each ``memory`` as bars a stage.

    Forwards and backwards are boxes (a later model chunk, or every second weight version of a stream, in a fuller
    colour) with their number where it fits; updates are ticks between them, transfers thin bars below.
    OSError when ``path`` cannot be written.
    """
    bodies = [min(_ROW * len(timeline.stages), _TALLEST) for timeline in timelines]
    height = _HEAD + sum(_TITLE + body + _AXIS for body in bodies) + (_TITLE + _BARS + _AXIS if memory else 0) + 0.1
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    _legend(figure, timelines)

    inner = _WIDTH - _LEFT - _RIGHT
    duration_ms = max((timeline.duration_ms for timeline in timelines), default=0.0)
    top = height - _HEAD
    for timeline, body in zip(timelines, bodies, strict=True):
        top -= _TITLE + body
        axes = _panel(figure, _LEFT, top, inner, body)
        draw_boxes(axes, timeline, duration_ms)
        axes.xaxis.set_major_formatter("{x:,g} ms")
        top -= _AXIS
    if memory:
        top -= _TITLE + _BARS
        each = (inner + _GAP) / len(memory)
        highest = max(max((*part.predicted, *(part.measured or ()))) for part in memory)
        for index, part in enumerate(memory):
            axes = _panel(figure, _LEFT + index * each, top, each - _GAP, _BARS)
            draw_memory(axes, part, highest, scale=index == 0)

    write_png(path, figure)


def _panel(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches."""
    page_width, page_height = figure.get_size_inches()
    return figure.add_axes((left / page_width, bottom / page_height, width / page_width, height / page_height))


def _legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    present = {span.action.kind for timeline in timelines for spans in timeline.stages for span in spans}
    entries: dict[str, Any] = {row.name: Patch(color=row.colour) for kind, row in KINDS.items() if kind in present}
    compute = (
        (timeline, span.action)
        for timeline in timelines
        for row in timeline.stages
        for span in row
        if span.action.kind in COMPUTE
    )
    if any(timeline.version(action) % 2 for timeline, action in compute):
        entries["odd weight version"] = tuple(Patch(color=shade(kind, 1)) for kind in (FORWARD, BACKWARD))
    height = figure.get_size_inches()[1]
    figure.legend(
        list(entries.values()),
        list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper right",
        bbox_to_anchor=(1 - _RIGHT / _WIDTH, 1 - 0.17 / height),
        ncols=len(entries) or 1,
        borderaxespad=0,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        handleheight=0.8,
        columnspacing=1.4,
    )
