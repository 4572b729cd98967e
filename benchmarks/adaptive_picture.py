"""Throughput over time: what the tuner expected of each candidate, what each had, and what was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from adaptive_phases import AUTO
from matplotlib.figure import Figure

__all__ = ["draw"]

_COLOURS: Final = ("#4477aa", "#cc6677", "#999933", "#aa4499")


def draw(path: Path, entry: dict[str, Any]) -> None:
    """Write a PNG of one adaptive run, an `adaptive` entry of the document."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    samples = entry["samples"]
    fixed = [name for name in entry["iterations_ms"] if name != AUTO]
    for name, colour in zip(fixed, _COLOURS, strict=False):
        measured = [samples / ms * 1e3 for ms in entry["iterations_ms"][name]]
        axes.plot(range(len(measured)), measured, color=colour, lw=1, alpha=0.5)
        retunes = entry["retunes"]
        expected = [samples / retuned["estimates_ms"][name] * 1e3 for retuned in retunes]
        at = [retuned["iteration"] for retuned in retunes]
        axes.plot(at, expected, color=colour, ls=":", lw=1.2, marker="o", ms=5, label=name)
        chosen = [(x, y) for x, y, retuned in zip(at, expected, retunes, strict=True) if retuned["chosen"] == name]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), ls="", marker="o", ms=13, mfc="none", mec="black", mew=1.5)
    auto = [samples / ms * 1e3 for ms in entry["iterations_ms"][AUTO]]
    axes.plot(range(len(auto)), auto, color="black", lw=1.6, label="auto")
    axes.plot([], [], ls="", marker="o", ms=13, mfc="none", mec="black", mew=1.5, label="chosen")
    for phase in entry["phases"]:
        if phase["phase"] == "preempted":
            axes.axvspan(phase["from"] - 0.5, phase["to"] - 0.5, color="0.93", zorder=0)
        middle = (phase["from"] + phase["to"] - 1) / 2
        axes.text(middle, 0.98, phase["phase"], transform=axes.get_xaxis_transform(), ha="center", va="top")
    axes.set_title("lines: measured; dots: expected from measured links", fontsize=10)
    axes.set_xlabel("iteration")
    axes.set_ylabel("samples a second")
    axes.margins(y=0.15)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=2)
    figure.savefig(path, dpi=100)
