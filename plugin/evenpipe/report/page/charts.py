"""The charts of a page as Bokeh models: stages × time, and below it what each stage holds, on one time axis."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, HoverTool, PanTool, Range1d, ResetTool, WheelZoomTool
from bokeh.plotting import figure

from evenpipe.report.page.content import Drawn, View, amount
from evenpipe.report.timeline import lane_of
from evenpipe.schedule import COMPUTE, KINDS, Action

__all__ = ["action_words", "held_words", "memory_chart", "memory_legend", "timeline_chart"]

_MARGIN: Final = 0.02
_MEASURED, _PREDICTED = "#5b8fc7", "#c8642b"
_EDGE_PX: Final = 0.7
#: How opaque the lower row is: its numbers are to be read on light and dark paper.
_FAINT: Final = 0.8
#: Within a stage's row of 1: compute, and below it two lanes, for what leaves and for what arrives.
_LANES: Final = {"compute": (0.0, 0.62), "update": (-0.04, 0.7), "leaving": (0.66, 0.16), "arriving": (0.84, 0.16)}
#: Bokeh escapes what it puts in the place of @names.
_ACTION_TIP: Final = (
    '<div class="tip"><strong>@name: @what</strong><br>stage @stage, @of<br>'
    "@start{0,0.00} ms to @end{0,0.00} ms: @took{0,0.00} ms</div>"
)


def timeline_chart(view: View, target: str) -> str:
    """The JSON of a chart for the element ``target``: each action of each stage, the measured over the predicted."""
    plot = _plot(view, "micro-batches in time")
    columns = _columns(view.drawn)
    source = ColumnDataSource(columns, name="actions")
    colours = {"fill_color": "colour", "fill_alpha": "alpha", "line_color": "edge", "line_width": _EDGE_PX}
    boxes = plot.quad(left="start", right="end", top="top", bottom="bottom", source=source, name="boxes", **colours)
    boxes.nonselection_glyph = boxes.glyph
    boxes.selection_glyph = boxes.glyph.clone(line_color="#d1006c", line_width=3)
    compute = [at for at, kind in enumerate(columns["kind"]) if kind in COMPUTE]
    middle = (np.asarray(columns["start"]) + np.asarray(columns["end"])) / 2
    level = (np.asarray(columns["top"]) + np.asarray(columns["bottom"])) / 2
    numbers = ColumnDataSource(
        {"x": middle[compute], "y": level[compute], "text": [columns["number"][at] for at in compute]}
    )
    size = {"text_font_size": "10px", "text_align": "center", "text_baseline": "middle", "text_color": "#1b1b1b"}
    plot.text(x="x", y="y", text="text", source=numbers, name="numbers", visible=False, **size)
    # The page fills it where boxes would be too thin to be seen: their edges would leave nothing of them.
    shares = ColumnDataSource({name: [] for name in ("start", "end", "top", "bottom", "colour", "alpha")})
    filled = {"fill_color": "colour", "fill_alpha": "alpha", "line_color": None}
    plot.quad("start", "end", "top", "bottom", source=shares, name="shares", visible=False, **filled)
    plot.add_tools(HoverTool(renderers=[boxes], tooltips=_ACTION_TIP))
    return _json(plot, target)


def memory_chart(view: View, target: str) -> str:
    """Return the JSON of a chart of what each stage holds: areas, and over them the prediction as a line."""
    plot = _plot(view, "saved activations in time", _peaks(view.drawn))
    highest, last_ms = _height(view.drawn), _duration(view)
    for index, one in enumerate(view.drawn):
        colour = _colour(one)
        if index == 0:
            source = ColumnDataSource(_areas(one, highest, last_ms))
            areas = plot.quad(
                "start", "end", "top", "bottom", source=source, fill_color=colour, line_color=colour, line_width=1
            )
            tip = '<div class="tip"><strong>stage @stage holds @held</strong><br>@live micro-batches (× chunks), '
            plot.add_tools(HoverTool(renderers=[areas], tooltips=f"{tip}{one.name}<br>from @start{{0,0.00}} ms</div>"))
            continue
        for stage, points in enumerate(one.memory):
            times = [point.at_ms for point in points]
            heights = [stage + 0.94 - 0.86 * _held(one, point) / highest for point in points]
            ends = ([*times, max([last_ms, *times])], heights + heights[-1:]) if points else ([], [])
            plot.step(*ends, mode="after", line_color=colour, line_width=1.6)
    return _json(plot, target)


def memory_legend(drawn: Sequence[Drawn]) -> tuple[Sequence[tuple[str, str, str]], str]:
    """Return what is drawn how (area or line, colour, words), and what the height of a stage's row stands for."""
    first, *others = drawn
    said = [("area", first, "area"), *(("line", one, "line") for one in others)]
    highest = _height(drawn)
    scale = amount(highest) if first.sized else f"{highest} live micro-batches (× chunks)"
    how = [(shape, _colour(one), f"{what}: {one.name}") for shape, one, what in said]
    return how, f"full height of every row: {scale}; beside each stage its peak, {first.name}"


def _peaks(drawn: Sequence[Drawn]) -> list[str]:
    """Return the peak of each stage in the first of ``drawn``, in words; empty where a stage's memory is not known."""
    first = drawn[0]
    most = [max(points, key=lambda point: _held(first, point), default=None) for points in first.memory]
    return ["" if point is None else held_words(first, point) for point in most]


def _height(drawn: Sequence[Drawn]) -> int:
    return max((_held(one, point) for one in drawn for row in one.memory for point in row), default=0) or 1


def _colour(one: Drawn) -> str:
    return _MEASURED if one.name == "measured" else _PREDICTED


def _plot(view: View, title: str, said: Sequence[str] = ()) -> Any:
    """``said``: of each stage, what stands below its name."""
    stages, duration_ms = max((len(one.stages) for one in view.drawn), default=1), _duration(view) or 1.0
    row = _row_px(len(view.drawn), stages)
    bounds = (-_MARGIN * duration_ms, (1 + _MARGIN) * duration_ms)
    plot = figure(
        height=56 + row * stages,
        sizing_mode="stretch_width",
        x_range=Range1d(start=bounds[0], end=bounds[1], bounds=bounds, min_interval=duration_ms / 5000),
        y_range=Range1d(start=stages, end=-0.06),
        x_axis_label="ms",
        tools=[PanTool(dimensions="width"), ResetTool()],
        toolbar_location=None,
        output_backend="canvas",
        name=title,
    )
    # A wheel alone scrolls the page, which is what readers want of it.
    plot.add_tools(WheelZoomTool(dimensions="width", modifiers={"ctrl": True}))
    every = -(-stages // 32)
    plot.yaxis.ticker = [stage + 0.45 for stage in range(0, stages, every)]
    names = {stage: f"stage {stage}" for stage in range(0, stages, every)}
    for stage, words in enumerate(said):
        if words and stage in names:
            names[stage] += f"\n{words}" if row >= 34 else f", {words}"
    plot.yaxis.major_label_overrides = {stage + 0.45: name for stage, name in names.items()}
    # Room for the longest of the names, so that a time is at the same place in all charts.
    plot.min_border_left = 80 if row >= 34 else 130
    plot.ygrid.grid_line_color = None
    plot.outline_line_color = None
    # The page shows through. Bokeh clears all but half a pixel of a filled border, white on dark paper.
    plot.border_fill_color = None
    plot.min_border_right = 12
    return plot


def _row_px(drawn: int, stages: int) -> int:
    """Return how high a stage's row is: with its edge, a transfer is to have three pixels of it."""
    if stages > 16:
        return 40 if drawn > 1 else 20
    return 48 if drawn > 1 else 34


def _duration(view: View) -> float:
    return max((span.end_ms for one in view.drawn for row in one.stages for span in row), default=0.0)


def _columns(drawn: Sequence[Drawn]) -> dict[str, Any]:
    """Return a row an action: compute first, so that ticks and transfers are drawn over it."""
    rows = [row for index, one in enumerate(drawn) for row in _rows(one, index, len(drawn))]
    rows.sort(key=lambda row: row["kind"] not in COMPUTE)
    names = rows[0].keys() if rows else ("kind", "start", "end", "top", "bottom", "number")
    numeric = ("start", "end", "top", "bottom", "alpha", "took")
    return {
        name: np.array([row[name] for row in rows], np.float64) if name in numeric else [row[name] for row in rows]
        for name in names
    }


def _rows(one: Drawn, index: int, of: int) -> Iterator[dict[str, Any]]:
    height = 0.88 / of
    for stage, spans in enumerate(one.stages):
        base = stage + 0.02 + index * height
        for action, start_ms, end_ms in spans:
            top, part = _LANES[lane_of(action)]
            kind = KINDS[action.kind]
            yield {
                "kind": action.kind,
                "name": str(action),
                "what": action_words(action),
                "stage": stage,
                "of": one.name,
                "number": str(action.micro_batch),
                "start": start_ms,
                "end": end_ms,
                "took": end_ms - start_ms,
                "top": base + 0.97 * height * top,
                "bottom": base + 0.97 * height * (top + part),
                "colour": kind.colour,
                "alpha": 1.0 if index == 0 else _FAINT,
                # White parts boxes; of what is a few pixels it would leave nothing.
                "edge": "#ffffffb0" if action.kind in COMPUTE else kind.colour,
            }


def action_words(action: Action) -> str:
    row = KINDS[action.kind]
    of = f"{row.name} of {'batch' if row.of_batch else 'micro-batch'} {action.micro_batch}"
    chunk = f", chunk {action.chunk}" if action.chunk else ""
    return of + chunk + (f", of stage {action.evictor}" if action.evictor >= 0 else "")


def _areas(one: Drawn, highest: float, last_ms: float) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {name: [] for name in ("start", "end", "top", "bottom", "stage", "live", "held")}
    for stage, points in enumerate(one.memory):
        ends = [*(point.at_ms for point in points), max([last_ms, *(point.at_ms for point in points)])]
        for point, (start_ms, end_ms) in zip(points, pairwise(ends), strict=True):
            if end_ms <= start_ms:
                continue
            row = (start_ms, end_ms, stage + 0.94 - 0.86 * _held(one, point) / highest, stage + 0.94, stage)
            for name, value in zip(columns, (*row, point.live, held_words(one, point)), strict=True):
                columns[name].append(value)
    numeric = ("start", "end", "top", "bottom")
    return {name: np.array(values, np.float64) if name in numeric else values for name, values in columns.items()}


def _held(one: Drawn, point: Any) -> int:
    return int(point.bytes if one.sized else point.live)


def held_words(one: Drawn, point: Any) -> str:
    """Return what a stage holds, in bytes where they are known."""
    return amount(point.bytes) if one.sized else f"{point.live} live"


def _json(plot: Any, target: str) -> str:
    """Nothing in it ends the script element that it is put into."""
    return json.dumps(json_item(plot, ID(target)), separators=(",", ":")).replace("<", "\\u003c")
