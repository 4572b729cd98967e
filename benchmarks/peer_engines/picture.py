"""Memory of the worst stage against throughput, a panel for each pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

__all__ = ["draw"]

_COLOURS: Final = {"Megatron": "#76b900", "torch": "#de3412", "DeepSpeed": "#7a5195", "EvenPipe": "#1f5fbf"}
#: That have their names on them beside what nothing beats in both.
_NAMED: Final = ("EvenPipe: 1F1B", "EvenPipe: 1F1B + BPipe", "EvenPipe: 2BW")
_MARKS: Final = {"Megatron": "s", "torch": "^", "DeepSpeed": "D", "EvenPipe": "o"}


def draw(path: Path, results: list[dict[str, Any]]) -> None:
    """As PNG. What nothing beats in both has its name on it; a line joins those that train by the same rule."""
    cases = list(dict.fromkeys((row["stages"], row["micro_batches"]) for row in results))
    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.9 * lines + 0.5), dpi=150, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for axes, case in zip(panels, cases, strict=False):
        rows = [row for row in results if (row["stages"], row["micro_batches"]) == case]
        least, most = (extreme(row["mib"] for row in rows) for extreme in (min, max))
        front = sorted((row for row in rows if row["front"] and not row["delayed"]), key=_place)
        axes.step(*zip(*map(_place, front), strict=True), where="post", color="#b9b9b2", linewidth=1.2, zorder=1)
        for engine, colour in _COLOURS.items():
            for delayed in (False, True):
                places = [_place(row) for row in rows if (row["engine"], row["delayed"]) == (engine, delayed)]
                if not places:
                    continue
                axes.scatter(
                    [mib for mib, _ in places],
                    [share for _, share in places],
                    s=30,
                    facecolors="white" if delayed else colour,
                    edgecolors=colour,
                    marker=_MARKS[engine],
                    label=f"{engine}, gradients a batch late" if delayed else engine,
                    zorder=2,
                )
        for row in rows:
            if row["front"] or row["peer"] in _NAMED:
                axes.annotate(
                    row["peer"].partition(": ")[2],
                    _place(row),
                    # Beside the smallest there is room to the left; below 1F1B there are other engines' 1F1B.
                    xytext=(-6, -3) if row["mib"] == least else (6, -3 if row["front"] else -12),
                    ha="right" if row["mib"] == least else "left",
                    textcoords="offset points",
                    fontsize=7,
                    color=_COLOURS[row["engine"]],
                )
        axes.set_title(f"p = {case[0]}, m = {case[1]}", loc="left", fontsize=10)
        axes.set_xlabel("saved by the worst stage, MiB", fontsize=8)
        axes.set_ylabel("throughput, of the limit without bubbles", fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xticks([least, *(mib for mib in (case[0] * 2**n for n in range(4)) if mib <= most)])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(0.45 * least, max(1.5 * most, 4 * least))
        axes.set_ylim(min(row["of_limit"] for row in rows) - 0.03, 1.02)
        axes.grid(color="#e6e6e2", linewidth=0.6)
        axes.tick_params(labelsize=8, length=0)
        axes.spines[:].set_visible(False)
    found = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path)


def _place(row: dict[str, Any]) -> tuple[float, float]:
    return row["mib"], row["of_limit"]
