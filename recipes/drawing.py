"""A recipe as a picture: each stage's memory against its device's, and the schedule on the simulator's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evenpipe.recipes import Recipe
from evenpipe.report.figures import write_png
from evenpipe.report.picture import draw_boxes
from evenpipe.report.timeline import Timeline
from evenpipe.schedule import KINDS, Link, Programs, Size, partner
from evenpipe.simulate import Costs, Wire, simulate

__all__ = ["draw"]

_GIB: Final = 2**30
_DPI: Final = 100
_WIDTH, _LEFT, _BETWEEN, _RIGHT = 11.0, 0.55, 0.2, 0.15
_BARS: Final = 2.9
_HEAD, _FOOT = 0.6, 0.42
_ROW, _LEAST, _MOST = 0.3, 0.9, 5.0
_COLOURS: Final = ("#b9b9b2", "#5b7fa8", "#d6d6d0")
_TEXT, _QUIET, _TOO_MUCH = "#2b2b2b", "#777777", "#d1495b"


def draw(recipe: Recipe, path: Path, title: str) -> None:
    """A PNG. Of a batch with many micro-batches a shorter one is drawn, in which the pipeline still fills and empties.

    OSError when it cannot be written.
    """
    found = recipe.estimate
    held = [stage.bytes for stage in found.stages]
    parts = {
        "weights, gradients, optimizer": [(one.weights + one.gradients + one.optimizer) / _GIB for one in held],
        "saved activations": [one.activations / _GIB for one in held],
        "rest": [(one.total - one.weights - one.gradients - one.optimizer - one.activations) / _GIB for one in held],
    }
    _draw_stages(path, title, parts, recipe.cluster.device.memory_gib, _timeline(recipe))


def _timeline(recipe: Recipe) -> Timeline:
    run, stages = recipe.estimate.run, recipe.estimate.stages
    spec = run.spec
    least = 2 * run.stages if run.stages <= 16 else run.stages + run.stages // 2
    whole = max(run.group_size, run.stages if run.chunks > 1 else 1)
    micro_batches = min(run.micro_batches, -(-least // whole) * whole)
    size = spec.fitted(Size(run.stages, micro_batches, run.chunks, run.group_size, 2 if "stream" in spec.needs else 1))
    wires: dict[Link, Wire] = {}
    for stage in range(run.stages // 2 if run.bpipe else 0):
        other, wire = partner(stage, run.stages), Wire(transmit_ms=stages[stage].eviction_ms)
        wires |= {Link("evict", stage, other): wire, Link("load", other, stage): wire}
    forward, backward = (tuple(getattr(stage, field) for stage in stages) for field in ("forward_ms", "backward_ms"))
    program = Programs(spec, run.bpipe, run.queues)(size)
    return Timeline.of(simulate(program, Costs(forward, backward, links=wires)), "", micro_batches)


def _draw_stages(
    path: Path, title: str, parts: Mapping[str, Sequence[float]], limit_gib: float, timeline: Timeline
) -> None:
    """``parts``: GiB of each stage by what they are for. OSError when ``path`` cannot be written."""
    stages = len(timeline.stages)
    body = min(max(_ROW * stages, _LEAST), _MOST)
    height = _HEAD + body + _FOOT
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    figure.text(_LEFT / _WIDTH, 1 - 0.12 / height, title, ha="left", va="top", fontsize=9.5, color=_TEXT)
    across = _WIDTH - _LEFT - _BARS - _BETWEEN - _RIGHT
    bars = figure.add_axes((_LEFT / _WIDTH, _FOOT / height, _BARS / _WIDTH, body / height))
    _draw_bars(bars, parts, limit_gib, stages)
    boxes = figure.add_axes(((_LEFT + _BARS + _BETWEEN) / _WIDTH, _FOOT / height, across / _WIDTH, body / height))
    draw_boxes(boxes, timeline, timeline.duration_ms)
    boxes.set_title("", loc="left")
    boxes.set_yticks([])
    boxes.set_xlabel("ms", fontsize=7, color=_QUIET, labelpad=1)
    present = {span.action.kind for row in timeline.stages for span in row}
    kinds = {row.name: Patch(color=row.colour) for kind, row in KINDS.items() if kind in present}
    memory = {name: Patch(color=colour) for name, colour in zip(parts, _COLOURS, strict=False)}
    for entries, left in ((memory, _LEFT), (kinds, _LEFT + _BARS + _BETWEEN)):
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="lower left",
            bbox_to_anchor=(left / _WIDTH, 1 - (_HEAD - 0.05) / height),
            ncols=len(entries),
            frameon=False,
            fontsize=6.5,
            borderaxespad=0,
            handlelength=1.0,
            handleheight=0.8,
            columnspacing=0.8,
            handletextpad=0.4,
        )
    write_png(path, figure, metadata={"Software": None})


def _draw_bars(axes: Axes, parts: Mapping[str, Sequence[float]], limit_gib: float, stages: int) -> None:
    """A row a stage, as the timeline has it."""
    left = [0.0] * stages
    for values, colour in zip(parts.values(), _COLOURS, strict=False):
        axes.barh([row + 0.45 for row in range(stages)], values, 0.72, left, color=colour, zorder=2)
        left = [start + value for start, value in zip(left, values, strict=True)]
    highest = max(*left, limit_gib)
    axes.set_xlim(0, 1.12 * highest)
    axes.set_ylim(stages, 0)
    axes.axvline(limit_gib, color=_TOO_MUCH, linewidth=1.0, zorder=3)
    if stages <= 24:
        for row, total in enumerate(left):
            axes.text(total + 0.01 * highest, row + 0.45, f"{total:.1f}", va="center", fontsize=6, color=_QUIET)
    every = -(-stages // 16)
    axes.set_yticks([row + 0.45 for row in range(0, stages, every)], [f"{row}" for row in range(0, stages, every)])
    axes.tick_params(labelsize=7, colors=_QUIET, length=0)
    axes.set_ylabel("stage", fontsize=7, color=_QUIET)
    axes.set_xlabel(f"GiB, of {limit_gib:g}", fontsize=7, color=_QUIET, labelpad=1)
    axes.grid(axis="x", color="#e6e6e2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
