"""The progress of training runs, on standard error: bars on a terminal, lines anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from evenpipe.train.journal import Iteration

__all__ = ["training_progress"]


@contextmanager
def training_progress(names: Sequence[str], iterations: int) -> Iterator[Callable[[Iteration], None]]:
    """Gives what to call after each iteration of a case; the cases are called `names`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: console.print(
            f"{names[done.case]}: iteration {done.iteration + 1}/{iterations}, {_found(done)}",
            highlight=False,
            soft_wrap=True,
        )
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[last]}"))
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(name, total=iterations, last="starting", start=False) for name in names]

        def show(done: Iteration) -> None:
            progress.start_task(tasks[done.case])
            progress.update(tasks[done.case], completed=done.iteration + 1, last=_found(done))

        yield show


def _found(done: Iteration) -> str:
    return f"loss {done.loss:.4f}, {done.ms:,.0f} ms"
