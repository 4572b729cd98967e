"""Text for people: the console, and tables in which nothing is cut off, however narrow the terminal is."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Final, Literal, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from evenpipe.wording.printable import printable

__all__ = ["DRAWN_WIDTH", "console_of", "in_runs", "print_prose", "print_table"]

#: Columns of what is drawn in blocks, at most.
DRAWN_WIDTH: Final = 160
#: The width without a terminal, in columns: nothing has to be wrapped for a file.
_UNBOUNDED: Final = 100_000
#: Columns of a cell of words, at most, and what it is wrapped to, at least.
_WORDS, _FEW_WORDS = 100, 24

Cell: TypeAlias = "str | Text"


def console_of(stderr: bool = False) -> Console:
    """Return a console as wide as the terminal (or COLUMNS); without styles where NO_COLOR is set or TERM is dumb."""
    width, height = shutil.get_terminal_size((_UNBOUNDED, 25))
    # Rich's own no_color leaves bold and dim.
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return _PrintableConsole(
        stderr=stderr, width=width, height=height, color_system=colours, highlight=False, markup=False
    )


class _PrintableConsole(Console):
    """Shows control characters of what it is given as escapes; styles are its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def in_runs(values: Iterable[str]) -> str:
    """Return the values of stages, such as 70.1 69.0×6 66.2: those that are alike in a row once."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return " ".join(f"{value}×{times}" if times > 1 else value for value, times in runs)


def print_prose(console: Console, text: str, style: str = "") -> None:
    """Print sentences, wrapped between words; a longer word, such as a path, stays whole, and an indent is kept."""
    for line in text.splitlines() or [""]:
        indent = " " * (len(line) - len(line.lstrip()))
        further = indent and f"{indent}  "
        width = max(1, console.width)
        wrapped = textwrap.wrap(line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)
        console.print("\n".join(wrapped), style=style, soft_wrap=True)


def print_table(
    console: Console,
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    caption: str = "",
    optional: Collection[str] = (),
) -> None:
    """Print a table; where it is too wide, without its ``optional`` columns, else a line for each cell."""
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    kept = list(range(len(heads)))
    if _least_width(console, heads, cells) > console.width:
        kept = [place for place in kept if heads[place] not in optional]
    heads_kept, cells_kept = [heads[place] for place in kept], [[row[place] for place in kept] for row in cells]
    if _least_width(console, heads_kept, cells_kept) <= console.width:
        console.print(_table(heads_kept, cells_kept))
        if len(kept) < len(heads):
            left_out = ", ".join(head for head in heads if head in optional)
            caption = "; ".join((*[caption] * bool(caption), f"not shown in {console.width} columns: {left_out}"))
    else:
        for row in cells:
            for place, (head, cell) in enumerate(zip(heads, row, strict=True)):
                if cell.plain:
                    console.print(Text.assemble("  " * bool(place), f"{head}: " if head else "", cell), soft_wrap=True)
    if caption:
        print_prose(console, caption)


def _table(heads: Sequence[str], cells: Sequence[Sequence[Text]]) -> Table:
    """Return a table whose numbers are whole and to the right; words are wrapped."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head, column in zip(heads, _columns(heads, cells), strict=True):
        numbers = all(not cell.plain or cell.plain[0].isdigit() for cell in column)
        wraps = any(" " in cell.plain for cell in column)
        justify: Literal["left", "right"] = "right" if numbers and not wraps else "left"
        table.add_column(head, no_wrap=not wraps, max_width=_WORDS if wraps else None, justify=justify, overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


def _least_width(console: Console, heads: Sequence[str], cells: Sequence[Sequence[Text]]) -> int:
    """Return the columns that the table needs, with cells of words as narrow as they may be."""
    width = console.measure(_table(heads, cells), options=console.options.update(max_width=_UNBOUNDED)).maximum
    for head, column in zip(heads, _columns(heads, cells), strict=True):
        lines = [line for cell in column for line in cell.plain.splitlines()]
        if any(" " in line for line in lines):
            natural = min(max(len(head), *map(len, lines)), _WORDS)
            width -= max(0, natural - _FEW_WORDS)
    return width


def _columns(heads: Sequence[str], cells: Sequence[Sequence[Text]]) -> list[list[Text]]:
    return [[row[place] for row in cells] for place in range(len(heads))]
