"""The progress of a training run, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from evenpipe.megatron.journal import Iteration

__all__ = ["training_progress"]


@contextmanager
def training_progress(names: list[str], iterations: int) -> Iterator[Callable[[Iteration], None]]:
    """One bar a case, named; gives what to call after each iteration of a case."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[last]}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = [progress.add_task(name, total=iterations, last="starting", start=False) for name in names]

        def show(done: Iteration) -> None:
            last = f"loss {done.loss:.4f}, {done.ms:,.0f} ms"
            progress.start_task(tasks[done.case])
            progress.update(tasks[done.case], completed=done.iteration + 1, last=last)

        yield show
