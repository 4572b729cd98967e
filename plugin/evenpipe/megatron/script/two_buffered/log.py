"""Which iteration a loss and a norm in Megatron's log belong to with 2BW, and what the second version costs."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenpipe.runtime.figures import StageFigures

if TYPE_CHECKING:
    from evenpipe.megatron.script.two_buffered.figures import BackgroundFigures
    from evenpipe.megatron.two_buffered import StepResult, TwoBuffered

__all__ = ["StepLog", "memory_line", "step_line"]

_MIB = 1 << 20


class StepLog:
    """Follows Megatron's log with the iterations that its figures belong to: a step ends while the next batch runs.

    All ranks call it alike; it makes none of them wait for another stage, but for :meth:`close`. `args` are Megatron's.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._buffers: TwoBuffered | None = None
        self._figures: BackgroundFigures | None = None
        self._first = 1
        self._resumed = False
        self._mean_from = 1
        self._told = 0

    def begin(self, buffers: TwoBuffered, resumed: bool) -> None:
        """To be called once, before the first iteration; `resumed`: from what 2BW has saved."""
        self._buffers = buffers
        self._first = self._mean_from = self._args.iteration + 1
        self._resumed = resumed
        self._told = self._args.iteration

    def iteration_ended(self, iteration: int) -> None:
        """After every iteration, first of all."""
        if iteration == self._first:
            self._tell_memory()
        self._tell_gathered()

    def gather(self, iteration: int, figures: StageFigures, stage: int, stages: int) -> None:
        """Send this rank's figures of `iteration`, which are told after the next one."""
        from evenpipe.megatron.script.two_buffered.figures import BackgroundFigures

        if self._figures is None:
            self._figures = BackgroundFigures(stage, stages)
        self._figures.start(iteration, figures)

    def logged(self, iteration: int, resets: bool) -> None:
        """Megatron has logged `iteration`; `resets`: the next one begins a new mean."""
        from megatron.training import print_rank_last

        finished = self._finished()
        saved_at = self._args.iteration if self._resumed else None
        print_rank_last(step_line((self._mean_from, iteration), finished, saved_at))
        self._told = finished[0] if finished is not None else self._told
        self._mean_from = iteration + 1 if resets else self._mean_from

    def close(self) -> None:
        """No iteration follows: finish the last step, and tell what has not been told."""
        from megatron.training import print_rank_last

        if self._buffers is None:
            return
        self._buffers.drain()
        self._tell_gathered()
        finished = self._finished()
        if finished is not None and finished[0] > self._told:
            print_rank_last(step_line(None, finished))
            self._told = finished[0]

    def _tell_gathered(self) -> None:
        from evenpipe.megatron.script.log import tell

        gathered = self._figures.finish() if self._figures is not None else None
        if gathered is not None:
            tell(*gathered)

    def _tell_memory(self) -> None:
        from megatron.core import parallel_state

        from evenpipe.runtime.gather import gather_text

        assert self._buffers is not None, "there is a model to train"
        stage = parallel_state.get_pipeline_model_parallel_rank()
        texts = gather_text(json.dumps([stage, self._buffers.weight_version_bytes, self._buffers.held_gradient_bytes]))
        if texts is not None:
            print(memory_line([json.loads(text) for text in texts]), flush=True)

    def _finished(self) -> tuple[int, StepResult] | None:
        """The step that was finished last, and its iteration as Megatron's log counts."""
        assert self._buffers is not None, "there is a model to train"
        finished = self._buffers.finished
        return None if finished is None else (self._first + finished.batch, finished)


def step_line(
    losses: tuple[int, int] | None, finished: tuple[int, StepResult] | None, saved_at: int | None = None
) -> str:
    """One line: the iterations of the loss that Megatron has just logged, and that of the norm beside it.

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
    return f" [evenpipe] {' | '.join(columns)} |"


def memory_line(rows: Sequence[tuple[int, int, int]]) -> str:
    """One line in the order of stages, from (stage, bytes of a weight version, of held gradients) of all ranks."""
    stages = range(1 + max(row[0] for row in rows))

    def largest(column: int) -> str:
        return " ".join(f"{max(row[column] for row in rows if row[0] == stage) / _MIB:.1f}" for stage in stages)

    return f" [evenpipe] 2bw | second weight version MiB: {largest(1)} | held gradients MiB: {largest(2)} |"
