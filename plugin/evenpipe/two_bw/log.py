"""2BW in a framework's log: the batches of a loss and a norm, figures of stages, the memory of the second version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from evenpipe.runtime.exchange import Exchange, gather
from evenpipe.runtime.resources import StageFigures
from evenpipe.two_bw.gradients import Outcome
from evenpipe.two_bw.stream import TwoBW

__all__ = ["StepLog", "memory_line", "step_line"]

_MIB: Final = 1 << 20


class StepLog:
    """Follows a framework's log with the iterations that its figures belong to: a step ends while the next batch runs.

    All ranks call it alike; it makes none of them wait for another stage, but for rank 0 in the first iteration, and
    for :meth:`gathered` between batches. Make it before the first iteration, with so many `behind`; `resumed`: the
    framework logs the norm that 2BW saved. `say` prints a line where the framework has its log, `say_first` on rank 0,
    `show` takes an iteration and its stages' figures. `means`: a loss in the log is the mean of those since the line
    before.
    """

    def __init__(
        self,
        two_bw: TwoBW,
        behind: int,
        say: Callable[[str], object],
        say_first: Callable[[str], object],
        show: Callable[[int, Sequence[StageFigures]], object],
        *,
        means: bool,
        resumed: bool,
    ) -> None:
        self._two_bw = two_bw
        self._say = say
        self._say_first = say_first
        self._show = show
        self._means = means
        self._exchange: Exchange | None = None
        self._sent: tuple[int, int] | None = None  # the iteration whose figures are under way, and how many stages
        self._first = self._mean_from = behind + 1
        self._saved_at = behind if resumed else None
        self._logged: int | None = None  # the last iteration whose norm was logged; None where there is no log

    def iteration_ended(self, iteration: int, stage: int) -> None:
        """After every iteration, first of all."""
        if iteration == self._first:
            sizes = [stage, self._two_bw.versions.nbytes, self._two_bw.gradients.held_bytes]
            if self._two_bw.correction is not None:
                sizes.append(self._two_bw.correction.nbytes)
            if (rows := gather(sizes)) is not None:
                self._say_first(memory_line(rows, self._two_bw.name))
        self.gathered()

    def gather(self, iteration: int, figures: StageFigures, stage: int, stages: int, device: torch.device) -> None:
        """Send this rank's figures of `iteration`, with those of its step; they are shown after the next one."""
        exchange = self._exchange = self._exchange or Exchange.among_all(1 + len(figures), device)

        def send() -> None:
            exchange.start([stage, *figures])
            self._sent = iteration, stages

        self._two_bw.start_with_figures(self, send)

    def gathered(self) -> None:
        """Show the figures that were sent, if any: of each the largest, per stage."""
        self._two_bw.start_waiting(self)
        if self._exchange is None or self._sent is None:
            return
        (iteration, stages), self._sent = self._sent, None
        rows = self._exchange.finish()
        self._show(iteration, [StageFigures.of_row(_largest(rows, stage)) for stage in range(stages)])

    def logged(self, iteration: int, resets: bool = True) -> None:
        """The framework has logged `iteration`; `resets`: the next one begins a new mean."""
        finished = self._finished()
        self._say(step_line((self._mean_from if self._means else iteration, iteration), finished, self._saved_at))
        self._logged = finished[0] if finished is not None else self._first - 1
        self._mean_from = iteration + 1 if resets else self._mean_from

    def close(self) -> None:
        """No iteration follows: finish the last step, and log what has not been logged."""
        self._two_bw.drain()
        self.gathered()
        finished = self._finished()
        if finished is not None and self._logged is not None and finished[0] > self._logged:
            self._say(step_line(None, finished))
            self._logged = finished[0]

    def _finished(self) -> tuple[int, Outcome] | None:
        """Return the step that was finished last, and its iteration as the log counts."""
        finished = self._two_bw.finished
        return None if finished is None else (self._first + finished[0], finished[1])


def step_line(losses: tuple[int, int] | None, finished: tuple[int, Outcome] | None, saved_at: int | None = None) -> str:
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


def memory_line(rows: Sequence[Sequence[int]], schedule: str = "2bw") -> str:
    """One line in the order of stages, from (stage, bytes of the second version, of held gradients) of all ranks.

    Where there is a delay correction, its bytes follow.
    """
    of_stages = [_largest(rows, stage) for stage in range(1 + max(row[0] for row in rows))]
    columns = (" ".join(f"{nbytes / _MIB:.1f}" for nbytes in column) for column in zip(*of_stages, strict=True))
    named = zip(("second weight version", "held gradients", "delay correction"), columns, strict=False)
    return f"{schedule} | " + " | ".join(f"{name} MiB: {column}" for name, column in named) + " |"


def _largest(rows: Sequence[Sequence[Any]], stage: int) -> list[Any]:
    """Return the largest of each column after the first, which is the row's stage, over the rows of `stage`."""
    return [max(column) for column in zip(*(row[1:] for row in rows if int(row[0]) == stage), strict=True)]
