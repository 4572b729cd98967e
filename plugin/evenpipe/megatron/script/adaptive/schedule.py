"""Adaptive kFkB under a script's training loop, which has a micro-batch size of its own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evenpipe.megatron.adaptive.loss_weights import LossWeights
from evenpipe.megatron.adaptive.schedule import AdaptiveSchedule, Tuning
from evenpipe.megatron.schedule import PipelineSchedule
from evenpipe.planner import PlanError
from evenpipe.runtime.executor import Observer
from evenpipe.upstream.ending import end_job

__all__ = ["ScriptSchedule", "micro_batch_size"]


class ScriptSchedule(AdaptiveSchedule):
    """An `AdaptiveSchedule` that counts iterations as Megatron does, in whose `args` they are.

    Where no candidate fits, the job ends with one line.
    """

    def __init__(
        self,
        tuning: Tuning,
        args: Namespace,
        bpipe: bool = False,
        observer: Observer | None = None,
        connected: Callable[[PipelineSchedule], None] = lambda schedule: None,
    ) -> None:
        super().__init__(tuning, bpipe, observer, connected=connected)
        self._args = args
        self._loss_weights: LossWeights | None = None
        self._warned = False

    def attach(self, limit_bytes: int, weights: LossWeights | None) -> None:
        """Before the first batch, on all ranks alike: the memory of a process, and what looks at all that is read."""
        self._tuning = self._tuning._replace(limit_bytes=limit_bytes)
        self._loss_weights = weights

    def _train(self, **arguments: Any) -> list[Any]:
        # Megatron may run an iteration again, which is to be cut as before.
        self.iteration = self._args.curr_iteration
        if self._loss_weights is not None:
            arguments = arguments | {"data_iterator": _watched(self._loss_weights, arguments["data_iterator"])}
        try:
            losses = super()._train(**arguments)
        except PlanError as error:
            given = self._args.memory_gib
            end_job(f"{'--group-size auto' if given is None else f'--memory-gib {given}'}: {error}")
        self._warn()
        return losses

    def _warn(self) -> None:
        """Once: the first batch did not show what its size may be."""
        given, uneven = self._args.micro_batch_size, self._loss_weights is not None and not self._loss_weights.even_here
        if uneven and self._size != given and not self._warned:
            self._warned = True
            print(
                f" [evenpipe] warning: from iteration {self.iteration} on samples count different tokens in the loss, "
                f"which until the next decision is not what it is with --micro-batch-size {given} alone: add "
                "--calculate-per-token-loss",
                flush=True,
            )


def _watched(weights: LossWeights, data_iterator: Any) -> Any:
    source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    return None if source is None else weights.watch(source)


@contextmanager
def micro_batch_size(args: Namespace, size: int) -> Iterator[None]:
    """Within it Megatron's `args` say that micro-batches have `size` samples.

    A process that is sent its data by another one of its tensor-parallel group makes room for so many.
    """
    given, args.micro_batch_size = args.micro_batch_size, size
    try:
        yield
    finally:
        args.micro_batch_size = given
