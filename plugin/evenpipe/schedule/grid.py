"""A schedule as a plain-text grid of stages × steps, for error messages."""

from __future__ import annotations

from evenpipe.schedule.schedule import Schedule

__all__ = ["format_grid"]

_WINDOW = 12  # steps shown either side of the marked one: a grid of thousands of steps helps nobody


def format_grid(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """One line a stage, one column a step; ``mark`` (stage, step) is shown as ``[F3]`` and its line pointed at."""
    first, last = 0, max((len(row) for row in schedule.actions), default=0)
    if mark is not None:
        first, last = max(0, mark[1] - _WINDOW), min(last, mark[1] + _WINDOW + 1)
    cells = [
        [f"[{a}]" if (stage, step) == mark else f" {a} " for step, a in enumerate(row[:last]) if step >= first]
        for stage, row in enumerate(schedule.actions)
    ]
    width = max((len(cell) for row in cells for cell in row), default=0)
    lines = ["step     " + " ".join(f"{step:^{width}}" for step in range(first, last))]
    for stage, row in enumerate(cells):
        pointer = "  <-- here" if mark is not None and stage == mark[0] else ""
        lines.append(f"stage {stage:<3}" + " ".join(f"{cell:<{width}}" for cell in row) + pointer)
    return "\n".join(line.rstrip() for line in lines)
