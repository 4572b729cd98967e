"""Steps of torch's own optimizers that are submitted at the end of a batch and finished within the next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.heartbeat import wait_for
from evenpipe.runtime.weight_versions import WeightVersions
from evenpipe.two_bw.steps import Outcome, TwoBWSteps

__all__ = ["PlainSteps", "SharedGradients", "scaled_to"]


class SharedGradients(Protocol):
    """Sums the gradients of parameters of which several stages have a copy."""

    def fill(self) -> None:
        """Give copies that no gradient came to one of zeros."""

    def start(self, gradients: Mapping[int, Tensor]) -> None:
        """Send this stage's, by the ids of parameters, and wait for nobody. At one place of all stages' order."""

    def finish(self) -> None:
        """Wait for the others': what `start` was given are the sums. Nothing to do twice."""

    def __bool__(self) -> bool:
        """Whether this stage shares any."""


class PlainSteps(TwoBWSteps):
    """The optimizer of one stage of a pipeline of plain modules.

    squares: this stage's sums of squares of `parameter.grad`, in fp64, by piece of the model, zero for pieces on other
    stages, so that their sum over stages is exact. clip_grad: the largest norm of all stages' gradients; 0 for any.
    replicas: the processes with the same stage, whose gradients' mean is taken. ties: gradients shared with stages.
    """

    def __init__(
        self,
        versions: WeightVersions,
        optimizer: torch.optim.Optimizer,
        squares: Callable[[], Tensor],
        group: dist.ProcessGroup,
        clip_grad: float = 0.0,
        replicas: dist.ProcessGroup | None = None,
        ties: SharedGradients | None = None,
    ) -> None:
        row = squares()
        decides, shared = clip_grad > 0, ties is not None and bool(ties)
        super().__init__(versions, Exchange(group, len(row), row.device), None, decides, waits=decides or shared)
        self._optimizer = optimizer
        self._squares = squares
        self._limit = clip_grad
        self._replicas = replicas if replicas is not None and replicas.size() > 1 else None
        self._ties = ties
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._works: list[dist.Work] = []

    @property
    def gradients(self) -> list[Tensor]:
        """Of the submitted batch, until its step is finished."""
        return [gradient for _, gradient in self._kept]

    @property
    def held_gradient_bytes(self) -> int:
        """All of them, where the next batch's first backward comes before the step."""
        return sum(gradient.nbytes for gradient in self.gradients)

    def _groups(self) -> Sequence[dict[str, Any]]:
        return self._optimizer.param_groups

    def _start_reducing(self) -> None:
        # A learning-rate scheduler of torch's warns where no step came before its own; this one is submitted.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._ties is not None:
            self._ties.fill()
        every = [one for group in self._groups() for one in group["params"]]
        self._kept = [(one, one.grad) for one in every if one.grad is not None]
        for one, gradient in self._kept:
            one.grad = None  # where the next batch's add up
            if self._replicas is not None:
                work = dist.all_reduce(gradient, group=self._replicas, async_op=True)
                assert work is not None
                self._works.append(work)

    def _figures(self) -> Tensor:
        if self._replicas is not None and self._works:
            wait_for(self._works, self._replicas, "replicas' gradients", self.gradients[0].device)
            self._works.clear()
            for gradient in self.gradients:
                gradient.div_(self._replicas.size())
        if self._ties is not None:
            # Here, at one place of all stages' order. Of what the last stage begins when it has submitted, a wait of
            # its host's for its device would be one for the first stage, whose batch ends by what the last does next.
            self._ties.start({id(one): gradient for one, gradient in self._kept})
            self._ties.finish()
        with self._as_gradients():
            return self._squares()

    def _finish_reducing(self) -> None:
        """Sums over stages are among what the figures are of."""

    def _outcome(self, rows: list[list[float]]) -> Outcome:
        return Outcome(True, math.sqrt(sum(sum(of_piece) for of_piece in zip(*rows, strict=True))), None)

    def _step(self, update: bool) -> None:
        with self._as_gradients():
            if self._limit:
                assert self.outcome.grad_norm is not None, "the norm decides"
                scaled_to(self._limit, self.outcome.grad_norm, self.gradients)
            self._optimizer.step()
        self._kept = []

    @contextmanager
    def _as_gradients(self) -> Iterator[None]:
        """Inside, parameters have the gradients of the submitted batch."""
        present = [one.grad for one, _ in self._kept]
        for one, gradient in self._kept:
            one.grad = gradient
        try:
            yield
        finally:
            for (one, _), gradient_of_next in zip(self._kept, present, strict=True):
                one.grad = gradient_of_next


def scaled_to(limit: float, norm: float, gradients: Sequence[Tensor]) -> None:
    """Scale gradients of this norm so that it is at most `limit`."""
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / (norm + 1e-6))
