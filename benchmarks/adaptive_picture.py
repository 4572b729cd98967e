"""Throughput over time: what the tuner expected of each candidate, what each had, and what was chosen."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from adaptive_phases import AUTO
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

__all__ = ["draw"]

_COLOURS: Final = ("#4477aa", "#cc6677", "#999933", "#aa4499")
_CHOSEN: Final[dict[str, Any]] = {"ls": "", "marker": "o", "ms": 13, "mfc": "none", "mec": "black", "mew": 1.5}


def draw(path: Path, entry: dict[str, Any]) -> None:
    """Write a PNG of one adaptive run, an `adaptive` entry of the document."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()

    def throughput(iteration_ms: float) -> float:
        return float(entry["samples"] / iteration_ms * 1e3)

    names = [name for name in entry["iterations_ms"] if name != AUTO]
    colours = dict(zip(names, _COLOURS, strict=False))
    for name in (*names, AUTO):
        measured = [throughput(ms) for ms in entry["iterations_ms"][name]]
        style = {"color": "black", "lw": 1.5} if name == AUTO else {"color": colours[name], "lw": 3, "alpha": 0.4}
        axes.plot(range(len(measured)), measured, **style)
    ends = [*(retuned["iteration"] for retuned in entry["retunes"]), len(entry["iterations_ms"][AUTO])]
    for retuned, (begin, end) in zip(entry["retunes"], pairwise(ends), strict=True):
        for name, estimate_ms in retuned["estimates_ms"].items():
            expected = throughput(estimate_ms)
            # It holds until the next decision.
            axes.plot([begin, end], [expected, expected], color=colours[name], ls=":", lw=1.5)
            axes.plot(begin, expected, color=colours[name], marker="o", ms=6)
        axes.plot(begin, throughput(retuned["estimates_ms"][retuned["chosen"]]), **_CHOSEN)
    for phase in entry["phases"]:
        if phase["preempted"]:
            axes.axvspan(phase["from"] - 0.5, phase["to"] - 0.5, color="0.93", zorder=0)
        middle = (phase["from"] + phase["to"] - 1) / 2
        axes.text(middle, 0.97, phase["phase"], transform=axes.get_xaxis_transform(), ha="center", va="top")
    axes.set_xlabel("iteration")
    axes.set_ylabel("samples a second")
    axes.margins(y=0.15)
    axes.grid(alpha=0.3)
    handles = [Line2D([], [], color=colour, lw=3, alpha=0.6, label=name) for name, colour in colours.items()]
    handles += [
        Line2D([], [], color="black", lw=1.5, label=AUTO),
        Line2D([], [], color="0.3", ls=":", marker="o", ms=6, label="expected at a decision"),
        Line2D([], [], **_CHOSEN, label="chosen"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=100)
