"""Progress on a terminal, on standard error: what is done, for how long, and how much longer where that is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from evenpipe.cli.shown import console_of
from evenpipe.cli.verbosity import speaks

__all__ = ["Show", "progress"]


class Show(Protocol):
    """Takes what is done now, and how many of how many parts of it are done (0: not known)."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


class _Times(ProgressColumn):
    """Seconds since the command began; the parts that are done, and about how long the others take."""

    def __init__(self) -> None:
        super().__init__()
        self._began = monotonic()

    def render(self, task: Task) -> Text:
        text = f"{monotonic() - self._began:.0f} s"
        if task.total:
            text += f", {task.completed:,.0f} of {task.total:,.0f}"
        if task.time_remaining is not None:
            text += f", about {task.time_remaining:.0f} s left"
        return Text(text)


@contextmanager
def progress(command: str, first: str, lines: bool = False) -> Iterator[Show]:
    """Yield what shows the progress of a command; nothing is shown after -q, or where standard error is no terminal.

    lines: where it is none, print a line for whatever is done.
    """
    console = console_of(stderr=True)
    columns = (SpinnerColumn(), TextColumn(f"{command}: {{task.description}},"), _Times())
    shows, prints = console.is_terminal and speaks(), lines and not console.is_terminal and speaks()
    with Progress(*columns, console=console, transient=True, disable=not shows) as shown:
        number = shown.add_task(first, total=None)
        (task,) = shown.tasks

        def show(what: str, done: int = 0, total: int = 0) -> None:
            if prints:
                console.print(what, soft_wrap=True)
            if not total or done < task.completed:  # the pace of other parts tells nothing of these
                shown.reset(number)
            task.total = total or None
            shown.update(number, description=what, completed=done)

        yield show
