"""What a log says of 2BW: which batch a loss and a norm belong to, what stages held, what the second version costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from evenpipe.delayed.steps import DelayedSteps, StepResult
from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.figures import StageFigures
from evenpipe.runtime.gather import gather_text

__all__ = ["StepLog", "memory_line", "step_line"]

_MIB: Final = 1 << 20


class StepLog:
    """Follows a framework's log with the iterations that its figures belong to: a step ends while the next batch runs.

    All ranks call it alike; it makes none of them wait for another stage, but for rank 0 in the first iteration, and
    for :meth:`gathered` between batches. `say` prints a line where the framework has its log, `say_first` on rank 0,
    `show` takes an iteration and its stages' figures. `means`: a loss in the log is the mean of those since the line
    before.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        say_first: Callable[[str], object],
        show: Callable[[int, Sequence[StageFigures]], object],
        means: bool,
    ) -> None:
        self._say = say
        self._say_first = say_first
        self._show = show
        self._means = means
        self._steps: DelayedSteps | None = None
        self._figures: _BackgroundFigures | None = None
        self._first = self._mean_from = 1
        self._resumed = False
        self._said: int | None = None  # the last iteration whose norm was said; None where there is no log

    def begin(self, steps: DelayedSteps, behind: int, resumed: bool) -> None:
        """Before the first iteration, with so many `behind`; `resumed`: the framework logs the norm that 2BW saved."""
        self._steps = steps
        self._first = self._mean_from = behind + 1
        self._resumed = resumed
        self._said = None

    def iteration_ended(self, iteration: int, stage: int) -> None:
        """After every iteration, first of all."""
        if iteration == self._first and self._steps is not None:
            sizes = [stage, self._steps.weight_version_bytes, self._steps.held_gradient_bytes]
            if (texts := gather_text(json.dumps(sizes))) is not None:
                self._say_first(memory_line([json.loads(text) for text in texts]))
        self.gathered()

    def gather(self, iteration: int, figures: StageFigures, stage: int, stages: int, device: torch.device) -> None:
        """Send this rank's figures of `iteration`, which are shown after the next one."""
        if self._figures is None:
            self._figures = _BackgroundFigures(stage, stages, device)
        self._figures.start(iteration, figures)

    def gathered(self) -> None:
        """Show the figures that were sent, if any."""
        if self._figures is not None and (found := self._figures.finish()) is not None:
            self._show(*found)

    def logged(self, iteration: int, resets: bool = True) -> None:
        """The framework has logged `iteration`; `resets`: the next one begins a new mean."""
        finished = self._finished()
        saved_at = self._first - 1 if self._resumed else None
        self._say(step_line((self._mean_from if self._means else iteration, iteration), finished, saved_at))
        self._said = finished[0] if finished is not None else self._first - 1
        self._mean_from = iteration + 1 if resets else self._mean_from

    def close(self) -> None:
        """No iteration follows: finish the last step, and say what has not been said."""
        if self._steps is None:
            return
        self._steps.drain()
        self.gathered()
        finished = self._finished()
        if finished is not None and self._said is not None and finished[0] > self._said:
            self._say(step_line(None, finished))
            self._said = finished[0]

    def _finished(self) -> tuple[int, StepResult] | None:
        """The step that was finished last, and its iteration as the log counts."""
        finished = self._steps.finished if self._steps is not None else None
        return None if finished is None else (self._first + finished.batch, finished)


class _BackgroundFigures:
    """Every rank's figures of an iteration, gathered while the next one runs; all start and finish at the same ones."""

    def __init__(self, stage: int, stages: int, device: torch.device) -> None:
        self._stage = stage
        self._stages = stages
        self._iteration: int | None = None
        self._exchange = Exchange.among_all(1 + len(StageFigures._fields), device)

    def start(self, iteration: int, figures: StageFigures) -> None:
        """Send this rank's; what was sent before has been fetched."""
        self._exchange.start([self._stage, *figures])
        self._iteration = iteration

    def finish(self) -> tuple[int, tuple[StageFigures, ...]] | None:
        """The iteration that was sent last, with the largest of each figure per stage; None where none was."""
        if self._iteration is None:
            return None
        rows, iteration, self._iteration = self._exchange.finish(), self._iteration, None
        of_stages = [_largest(rows, stage) for stage in range(self._stages)]
        return iteration, tuple(StageFigures(int(live), int(peak), int(out), ms) for live, peak, out, ms in of_stages)


def step_line(
    losses: tuple[int, int] | None, finished: tuple[int, StepResult] | None, saved_at: int | None = None
) -> str:
    """One line: the iterations of the loss that the framework has just logged, and that of the norm that is known.

    Before a step is `finished`, that is the norm of the iteration that was `saved_at`.
    """
    columns = []
    if losses is not None:
        first, last = losses
        loss = f"loss of iteration {last}" if first == last else f"loss of iterations {first} to {last}"
        columns += [f"iteration {last}", loss]
    if finished is None:
        columns.append("no step finished yet" if saved_at is None else f"the grad norm is of iteration {saved_at}")
    else:
        iteration, step = finished
        norm = "no grad norm" if step.grad_norm is None else f"grad norm {step.grad_norm:.3f}"
        columns.append(f"{norm} of iteration {iteration}{'' if step.updated else ': its step was skipped'}")
    return f"{' | '.join(columns)} |"


def memory_line(rows: Sequence[Sequence[int]]) -> str:
    """One line in the order of stages, from (stage, bytes of a weight version, of held gradients) of all ranks."""
    of_stages = [_largest(rows, stage) for stage in range(1 + max(row[0] for row in rows))]
    version, held = (" ".join(f"{nbytes / _MIB:.1f}" for nbytes in column) for column in zip(*of_stages, strict=True))
    return f"2bw | second weight version MiB: {version} | held gradients MiB: {held} |"


def _largest(rows: Sequence[Sequence[Any]], stage: int) -> list[Any]:
    """Of each column after the first, which says whose a row is."""
    return [max(column) for column in zip(*(row[1:] for row in rows if int(row[0]) == stage), strict=True)]
