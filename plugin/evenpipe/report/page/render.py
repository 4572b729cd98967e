"""Puts a page together: the template, the charts, and the library that draws them, in one file."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from evenpipe import __version__
from evenpipe.report.page.charts import action_words, held_words, memory_chart, memory_legend, timeline_chart
from evenpipe.report.page.content import Drawn, View
from evenpipe.schedule import KINDS

__all__ = ["page"]

_TEMPLATES: Final = Path(__file__).parent / "templates"
#: More actions than this have no table: a page is to stay below 3 MB.
_MOST_ROWS: Final = 4000


def page(title: str, views: Sequence[View]) -> str:
    """Return the HTML. It asks nothing of a network: its policy lets a browser load nothing at all."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )
    environment.filters["coded"] = _coded
    shown = [_shown(view, number) for number, view in enumerate(views)]
    return environment.get_template("page.html.j2").render(
        title=title,
        shown=shown,
        version=__version__,
        style=Markup(_read("style.css")),
        script=Markup(_read("page.js")),
        library=Markup(_library()),
    )


def _coded(text: str) -> Markup:
    """Return ``text`` as HTML, with what is between backticks as code: people type that."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _library() -> str:
    """Bokeh's own script, as its package has it (BSD-3-Clause)."""
    script = resources.files("bokeh") / "server" / "static" / "js" / "bokeh.min.js"
    return re.sub("</(?=script)", r"<\\/", script.read_text(encoding="utf-8"), flags=re.IGNORECASE)


def _shown(view: View, number: int) -> dict[str, Any]:
    """Return a view as the template takes it."""
    present = {span.action.kind for one in view.drawn for row in one.stages for span in row}
    charts = {"timeline": timeline_chart, "memory": memory_chart}
    legend, scale = memory_legend(view.drawn) if view.drawn else ((), "")
    return {
        "view": view,
        **{name: Markup(chart(view, f"{name}-{number}")) if view.drawn else Markup() for name, chart in charts.items()},
        "legend": legend,  # how (area or line), colour, words
        "scale": scale,
        "kinds": [(letter, row.name, row.colour) for letter, row in KINDS.items() if letter in present],
        "actions": _actions(view.drawn),
    }


def _actions(drawn: Sequence[Drawn]) -> list[list[dict[str, Any]]]:
    """Return the rows of the table beside the chart, by stage; none where there are too many."""
    if not drawn or drawn[0].actions > _MOST_ROWS:
        return []
    first, *others = drawn
    beside = [{span.action: span for span in row} for row in (others[0].stages if others else [])]
    times = [[point.at_ms for point in points] for points in first.memory]
    table = []
    for stage, row in enumerate(first.stages):
        rows = []
        for action, start_ms, end_ms in row:
            cells = [f"{start_ms:.2f}", f"{end_ms:.2f}"]
            if beside:
                other = beside[stage].get(action)
                cells += ["", ""] if other is None else [f"{other.start_ms:.2f}", f"{other.end_ms:.2f}"]
            cells.append(_held(first, times, stage, end_ms))
            rows.append({"name": str(action), "what": action_words(action), "cells": cells})
        table.append(rows)
    return table


def _held(one: Drawn, times: Sequence[Sequence[float]], stage: int, at_ms: float) -> str:
    """Return what the stage holds once an action has ended at ``at_ms``.

    In simulations the next action often starts at that very time: what is gone by then counts, what comes does not.
    """
    if stage >= len(times):
        return ""
    points, at = one.memory[stage], bisect_left(times[stage], at_ms)
    while at < len(points) and points[at].at_ms == at_ms and points[at].live < (points[at - 1].live if at else 0):
        at += 1
    return held_words(one, points[at - 1]) if at else ""
