"""A framework's half of 2BW: how it reduces a batch's gradients, holds them, and steps with them one batch later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.runtime.exchange import Exchange, JointExchange
from evenpipe.runtime.heartbeat import wait_for
from evenpipe.runtime.weight_versions import WeightVersions

__all__ = ["Gradients", "LossScale", "Outcome", "ParameterGradients", "TiedSums", "held_gradient_bytes"]


class Outcome(NamedTuple):
    """The outcome of a step. `grad_norm` is None where it is no number, or where nothing needed the norm."""

    updated: bool
    grad_norm: float | None
    num_zeros: float | None

    @property
    def overflow(self) -> bool:
        """Whether the step was skipped since a gradient is no number, and not since a limit forbade it."""
        return not self.updated and self.grad_norm is None


class LossScale:
    """fp16: the loss scale of each batch under way, which it keeps from its begin until its step.

    `read` gives the scaler's, `learn` tells it whether a batch overflowed. A step is finished in the middle of the next
    batch, on each stage at another micro-batch. So its outcome counts for the batch after that one, whether or not the
    stream is drained in between: all stages agree, and so do runs with evaluations, saves and resumes.
    """

    def __init__(self, read: Callable[[], Any], learn: Callable[[bool], object]) -> None:
        self._read = read
        self._learn = learn
        self._outcomes: deque[tuple[int, bool]] = deque()  # batches that the scaler has not learnt of, in order
        #: The scale of the batch whose losses are being computed, and of that whose step is to come.
        self.present: Any = 1.0
        self.submitted: Any = 1.0

    @property
    def unlearnt(self) -> list[bool]:
        """Return, for each batch that the scaler has not learnt of, whether it overflowed.

        After `drain`, at most the last batch is left.
        """
        return [overflow for _, overflow in self._outcomes]

    def start_batch(self, batch: int) -> None:
        """The call of `batch` begins, or could: the scaler learns of the batches up to two before."""
        while self._outcomes and self._outcomes[0][0] <= batch - 2:
            self._learn(self._outcomes.popleft()[1])
        self.present = self._read()

    def submit(self) -> None:
        """The batch ends whose losses were multiplied by the present scale."""
        self.submitted = self.present

    def step_ended(self, batch: int, overflow: bool) -> None:
        """The step of `batch` was made, or skipped since it had a value that is not finite."""
        self._outcomes.append((batch, overflow))

    def restart(self, batch: int, unlearnt: Sequence[bool]) -> None:
        """Go on with `batch` from a checkpoint, whose scaler has not learnt of the batches right before it."""
        self._outcomes = deque(zip(range(batch - len(unlearnt), batch), unlearnt, strict=True))


class Gradients(ABC):
    """The gradients and the optimizer of one stage, as `TwoBW` drives them: `reduce`, `hold`, `outcome`, `step`."""

    #: Both versions of the weights that the optimizer steps.
    versions: WeightVersions
    #: Brings every process' row of figures to all of them; None: nothing depends on figures, and nobody asks for any.
    exchange: Exchange | JointExchange | None
    #: In fp16.
    loss_scale: LossScale | None = None
    #: Whether all stages' figures, a norm or an overflow, decide what a step is.
    decides: bool
    #: Whether a step has to wait for other stages.
    waits: bool

    @property
    @abstractmethod
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """The optimizer's parameter groups."""

    @property
    @abstractmethod
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those of torch that write the weights, or their masters, at the bottom of the framework's."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """The memory of gradients that wait for their step while the next ones are added up."""

    @abstractmethod
    def reduce(self) -> None:
        """After the last backward of a batch: reduce its gradients in the background, without a wait for a stage."""

    @abstractmethod
    def hold(self) -> Tensor:
        """End the reductions within the stage, start those between stages; return this process' row of figures.

        All stages call it at one place of their order, or, where steps do not wait, at the latest there.
        """

    @abstractmethod
    def outcome(self, rows: list[list[float]]) -> Outcome:
        """Return the outcome of the step, from the figures of all processes."""

    @abstractmethod
    def step(self, outcome: Outcome) -> None:
        """End the reductions between stages; step with the batch's gradients, or only let go of them if skipped."""

    def settle(self) -> None:  # noqa: B027 (most frameworks write all of them in the step)
        """Wait until all of the newest weights are there, before anything reads them. Nothing to do twice."""

    def update_early(self, stage: int) -> bool:
        """Return whether `stage` can finish a step before the next batch's first backward.

        If it can, no gradients are held. Stage 0 is the last to end a batch: it never waits for another stage's
        compute. The others do not have to if neither a norm, nor an overflow, nor a tied weight's other end decides
        what the step is.
        """
        return stage == 0 or not self.waits


class TiedSums:
    """Gradients of tied weights, summed in place, in the background, over the stages that share each.

    The norm counts a weight on the first stage that has it, which is the last to end a batch.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[Tensor, dist.ProcessGroup, dist.Work, bool, Callable[[Tensor], None] | None]] = []

    def start(
        self,
        gradient: Tensor,
        group: dist.ProcessGroup,
        is_first: bool,
        then: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Give this stage's part, on all stages of `group` at one place of their order; `then` takes the sum."""
        work = dist.all_reduce(gradient, group=group, async_op=True)
        assert work is not None, "this stage is of the group"
        self._under_way.append((gradient, group, work, is_first, then))

    def finish(self, counted: bool = False) -> None:
        """Wait for all sums. Nothing to do twice.

        `counted`: only for weights that are counted here. Other stages have given their parts, as they end a batch
        earlier.
        """
        under_way, self._under_way = self._under_way, []
        for tied in under_way:
            gradient, group, work, is_first, then = tied
            if counted and not is_first:
                self._under_way.append(tied)
                continue
            wait_for([work], group, "gradients of tied weights", gradient.device)
            if then is not None:
                then(gradient)


class ParameterGradients:
    """Gradients that lie with their parameters: kept from a batch's end, while the next batch's take their places."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._kept: list[Tensor | None] = []

    @property
    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that have a gradient, and it."""
        pairs = zip(self._parameters, self._kept, strict=True)
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Take a batch's gradients away from `parameters`."""
        self._parameters = list(parameters)
        self._kept = self._exchanged([None] * len(self._parameters))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, parameters have the gradients that were kept, and no others."""
        next_batch = self._exchanged(self._kept)
        try:
            yield
        finally:
            self._exchanged(next_batch)

    def let_go(self) -> None:
        """The step has been made."""
        self._parameters, self._kept = [], []

    def _exchanged(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        before = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return before


def held_gradient_bytes(numbers: int, element_bytes: int, replicas: int) -> int:
    """g · N / d bytes, on a stage whose steps wait: the gradients that the rank's own optimizer steps with.

    `numbers` N is what the stage's gradient buffers have room for, padding included, `element_bytes` g what one of them
    takes, and `replicas` d among how many the optimizer's state is dealt out (the distributed optimizer, ZeRO-1): 1
    where each has all of it. Buffers with other replicas, as of experts, count apart. Raises ValueError where the
    buffers cannot be dealt out evenly.
    """
    if numbers % replicas:
        raise ValueError(f"{numbers} gradients cannot be dealt out evenly to {replicas} replicas")
    return numbers // replicas * element_bytes
