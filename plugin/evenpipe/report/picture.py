"""Timelines and per-stage memory as one PNG."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from evenpipe.report.bars import draw_memory
from evenpipe.report.boxes import draw_boxes, shade
from evenpipe.report.files import write_atomically
from evenpipe.report.timeline import StageMemory, Timeline
from evenpipe.schedule import BACKWARD, COMPUTE, FORWARD, KINDS

__all__ = ["draw_comparison"]

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

    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def _panel(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches."""
    page_width, page_height = figure.get_size_inches()
    return figure.add_axes(
        (left / page_width, bottom / page_height, width / page_width, height / page_height),
    )


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
