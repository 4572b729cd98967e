"""Per-stage memory drawn on given axes: bars of the predicted peaks and, next to them, of the measured ones."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from evenpipe.report.timeline import StageMemory

__all__ = ["draw_memory"]

_PREDICTED, _MEASURED = "#d6d6d0", "#5b7fa8"
_TEXT, _QUIET = "#2b2b2b", "#777777"
_FONT_PT, _CHARACTER_EM = 6.5, 0.62
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
    character_px = _CHARACTER_EM * _FONT_PT * axes.figure.dpi / 72
    for index, (label, values, colour) in enumerate(series):
        places = [stage + (index - (len(series) - 1) / 2) * width for stage in stages]
        bars = axes.bar(places, values, width * 0.94, color=colour, label=label, zorder=2)
        if width * stage_px > 4 * character_px:
            axes.bar_label(bars, fmt="{:.4g}", fontsize=_FONT_PT, color=_TEXT, padding=1)
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
