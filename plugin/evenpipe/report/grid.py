"""A schedule as coloured text: stages down, time slots across, transfers and updates under the compute beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from evenpipe.schedule import COMPUTE, INPUT_GRADIENT, KINDS, Action, Kind, Program
from evenpipe.simulate import Costs, Span, simulate

__all__ = ["timeline_grid"]

_Line = dict[int, Action]


def timeline_grid(program: Program, width: int = 120) -> Text:
    """``program`` with one slot a forward or backward, in blocks of slots that fit ``width`` columns.

    An update stands under the compute that comes next; it takes no slot.

    ::

        slot     0  1  2  3
        stage 0  F0 F1 F2 F3
                       E1       (starts when F1 has ended, runs beside F2)
    """
    schedule = program.schedule
    # So that each action takes 1, or, where some backwards are split, a whole one 2.
    forward_ms = (float(schedule.chunks),) * schedule.stages
    split = any(action.kind == INPUT_GRADIENT for row in schedule.actions for action in row)
    simulation = simulate(program, Costs(forward_ms, tuple(time * (1 + split) for time in forward_ms)))
    stages = [_lines(spans) for spans in simulation.timeline]

    label = len(f"stage {schedule.stages - 1}") + 2
    cell = max(len(str(action)) for row in schedule.actions for action in row) + 1
    slots = 1 + max(slot for lines in stages for line in lines for slot in line)
    per_block = max(1, (width - label) // cell)
    grid = Text(no_wrap=True)
    for first in range(0, slots, per_block):
        block = range(first, min(first + per_block, slots))
        grid.append("slot".ljust(label) + "".join(str(slot).ljust(cell) for slot in block).rstrip(), "dim")
        for stage, lines in enumerate(stages):
            for index, line in enumerate(lines):
                if index and not any(slot in line for slot in block):
                    continue
                grid.append("\n" + ("" if index else f"stage {stage}").ljust(label))
                _append_cells(grid, [line.get(slot) for slot in block], cell)
        grid.append("\n\n")
    return grid.append_text(_legend(action.kind for row in schedule.actions for action in row))


def _lines(spans: Iterable[Span]) -> list[_Line]:
    """Return a stage's text lines, slot to action: its compute, then as many for the rest as starts in one slot."""
    lines: list[_Line] = [{}]
    for action, start, _ in spans:
        slot = round(start)
        if action.kind in COMPUTE:
            lines[0][slot] = action
            continue
        free = next((line for line in lines[1:] if slot not in line), None)
        if free is None:
            lines.append(free := {})
        free[slot] = action
    return lines


def _append_cells(grid: Text, actions: Sequence[Action | None], cell: int) -> None:
    for action in actions:
        if action is None:
            grid.append(" " * cell)
        else:
            grid.append(str(action).ljust(cell - 1), _style(action.kind))
            grid.append(" ")


def _legend(kinds: Iterable[Kind]) -> Text:
    present = set(kinds)
    legend = Text()
    for kind, row in KINDS.items():
        if kind in present:
            legend.append(f"{kind} {row.name}", _style(kind))
            legend.append("  ")
    return legend


def _style(kind: Kind) -> str:
    return f"black on {KINDS[kind].colour}" if kind in COMPUTE else f"bold {KINDS[kind].colour}"
