"""Steps of an optimizer that are submitted at the end of a batch and finished within the next one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenpipe.runtime.exchange import Exchange, JointExchange
from evenpipe.runtime.weight_versions import WeightVersions

__all__ = ["LossScale", "Outcome", "TwoBWSteps"]

_Settings = list[dict[str, Any]]


class Outcome(NamedTuple):
    """What came of a step. `grad_norm` is None where it was skipped, or where nothing needed the norm."""

    updated: bool
    grad_norm: float | None
    num_zeros: float | None


class LossScale:
    """fp16: the loss scale of each batch under way, which it keeps from its begin until its step.

    `read` gives the scaler's, `learn` tells it whether a batch overflowed. A step is finished in the middle of the next
    batch, on each stage at another micro-batch. So what comes of it is for the batch after that one, whether or not the
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
        """Whether the batches overflowed that the scaler has not learnt of: after `drain`, the last one at most."""
        return [overflow for _, overflow in self._outcomes]

    def start_batch(self, batch: int) -> None:
        """The call of `batch` begins, or could: the scaler learns of what came two batches before, and earlier."""
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


class TwoBWSteps(ABC):
    """The optimizer of one stage under 2BW: W(t+1) = W(t) - step of the gradients at W(t-1) (PipeDream-2BW §3.1).

    A step is *submitted* at the end of its batch. What other stages have to know of its gradients is *gathered* in the
    background, at a place of the schedule by which all stages have submitted; and the step is *finished*, with the
    learning rate of its own batch, where the schedule has its update. What a stage then needs of others has been under
    way for long. `drain` finishes it at once.

    `exchange` brings rows of figures to all processes (None: nothing depends on them, and nobody asks); `decides`:
    what the step is depends on them. `waits`: a step has to wait for other stages. A framework says how its gradients
    are reduced and its optimizer steps.
    """

    def __init__(
        self,
        versions: WeightVersions,
        exchange: Exchange | JointExchange | None,
        loss_scale: LossScale | None,
        decides: bool,
        waits: bool,
    ) -> None:
        self.versions = versions
        self.batch = 0  # that is submitted next; the first that runs on two equal versions is 0
        self.loaded_at = 0
        #: Of the step that was finished last, here or before a resume; schedules of the rate count a first as made.
        self.outcome = Outcome(True, None, None)
        #: Ends the stream that the steps belong to, between two batches.
        self.break_off: Callable[[], None] = lambda: None
        #: Each starts something else that all stages exchange between two batches, at the place of the figures.
        self.gather_too: list[Callable[[], None]] = []
        self.exchange = exchange
        self._loss_scale = loss_scale
        self._decides = decides
        self._waits = waits
        self._settings: _Settings | None = None  # of the submitted step's own batch
        self._row: Tensor | None = None  # of figures, from when they are known until they are sent
        self._owed = False  # whether the submitted step's figures are still to be sent
        self._unread: int | None = None  # a batch whose step is finished, but not what was gathered of it
        self._finished: int | None = None

    @property
    def finished(self) -> tuple[int, Outcome] | None:
        """The last batch of whose step everything is known, counted from 0 since the weights were made or loaded."""
        return None if self._finished is None else (self._finished - self.loaded_at, self.outcome)

    @property
    def owes_figures(self) -> bool:
        """Whether those of the submitted step have not been gathered yet."""
        return self._owed

    @property
    @abstractmethod
    def held_gradient_bytes(self) -> int:
        """The memory of gradients that wait for their step while the next ones are added up."""

    def update_early(self, stage: int) -> bool:
        """Whether `stage` can finish a step before the next batch's first backward, so that no gradients are held.

        Stage 0 is the last to end a batch: it never waits for another stage's compute. The others do not have to if
        neither a norm, nor an overflow, nor a tied weight's other end decides what the step is.
        """
        return stage == 0 or not self._waits

    def start_batch(self) -> None:
        """The call of `batch` begins."""
        if self._loss_scale is not None:
            self._loss_scale.start_batch(self.batch)

    @torch.no_grad()
    def submit(self) -> Outcome:
        """In place of `optimizer.step()`, after all backwards of a batch; the outcome of the step before."""
        self._read()
        assert self._settings is None, "the schedule finishes one step before the next is submitted"
        self._settings = deepcopy(_settings_of(self._groups()))  # a rate may be a tensor, which schedules write to
        self.batch += 1
        self._owed = True
        if self._loss_scale is not None:
            self._loss_scale.submit()
        self._start_reducing()
        return self.outcome

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the submitted step's figures under way, if they are not: all stages at the same place of an order."""
        if not self._owed:
            return
        self._count()
        self._owed = False
        row, self._row = self._row, None
        if self.exchange is not None and row is not None:
            self.exchange.start(row)
        for start in self.gather_too:
            start()

    @torch.no_grad()
    def finish(self) -> None:
        """Write the weights of the submitted step over the older version; nothing to do without one."""
        if self._settings is None:
            return
        self._count()
        if self._decides:
            self.gather()
        settings, self._settings = self._settings, None
        self._finish_reducing()
        self._unread = self.batch - 1
        if self._decides:
            self._read()
        updated = self.outcome.updated if self._decides else True
        with self.versions.writing(), _with_settings(self._groups(), settings):
            self._step(updated)
        if self._loss_scale is not None:
            self._loss_scale.step_ended(self.batch - 1, not updated)

    def drain(self) -> None:
        """Finish the submitted step, drop what has been forwarded of the next batch, and leave the newest weights.

        All ranks call it, between two batches. What had been read for the dropped forwards will be read again. Nothing
        to do twice.
        """
        self.break_off()
        self.gather()
        self.finish()
        self._read()
        self.versions.use(self.versions.latest)
        self.start_batch()  # a checkpoint is to have what the scaler knows then

    def state_dict(self, places: Sequence[int] | None = None) -> dict[str, Any]:
        """After `drain`: what a checkpoint needs beside the framework's own, which has the newest weights.

        Of the older version, only the parameters at `places`, if these are given.
        """
        before = self.versions.tensors(self.versions.latest - 1) if self.batch > 0 else None
        if before is not None and places is not None:
            before = [before[place] for place in places]
        return {
            "before": None if before is None else [_on_host(tensor) for tensor in before],
            "outcome": list(self.outcome),
            "unlearnt": [] if self._loss_scale is None else self._loss_scale.unlearnt,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint whose newest weights have been loaded; None: both versions are these.

        Raises ValueError for weights of other shapes.
        """
        before = None if state is None else state["before"]
        newest = self.versions.tensors(self.versions.latest)
        if before is not None and [tensor.shape for tensor in before] != [tensor.shape for tensor in newest]:
            raise ValueError("the older weight version in the checkpoint has other shapes than this stage's parameters")
        self.outcome = Outcome(*((True, None, None) if state is None else state["outcome"]))
        # Version 0 is the older one: batch 1 runs on it.
        self.batch = self.loaded_at = 0 if before is None else 1
        self._finished = None
        self.versions.restart(self.batch, before)
        if self._loss_scale is not None:
            self._loss_scale.restart(self.batch, () if state is None else state["unlearnt"])

    @abstractmethod
    def _groups(self) -> Sequence[dict[str, Any]]:
        """The optimizer's parameter groups."""

    @abstractmethod
    def _start_reducing(self) -> None:
        """After the last backward of a batch: reduce its gradients in the background, without a wait for a stage."""

    @abstractmethod
    def _figures(self) -> Tensor:
        """End the reductions within the stage, make those between stages; this process' row of figures."""

    @abstractmethod
    def _finish_reducing(self) -> None:
        """Wait for what is summed over stages."""

    @abstractmethod
    def _outcome(self, rows: list[list[float]]) -> Outcome:
        """What all processes' figures say of the step."""

    @abstractmethod
    def _step(self, update: bool) -> None:
        """Step with the gradients of the submitted batch, or, unless `update`, let go of them."""

    def _count(self) -> None:
        """Find the figures, while the gradients are there."""
        if self._owed and self._row is None:
            self._row = self._figures()

    def _read(self) -> None:
        """What was gathered of the step that is finished, or about to be."""
        if self._unread is None:
            return
        self._finished, self._unread = self._unread, None
        found = self.exchange.finish() if self.exchange is not None else None
        self.outcome = Outcome(True, None, None) if found is None else self._outcome(found)


def _settings_of(groups: Sequence[Mapping[str, Any]]) -> _Settings:
    """What of parameter groups training loops and learning-rate schedules change after every iteration."""
    changed = ("lr", "weight_decay", "betas", "momentum")
    return [{name: group[name] for name in changed if name in group} for group in groups]


@contextmanager
def _with_settings(groups: Sequence[dict[str, Any]], settings: _Settings) -> Iterator[None]:
    """Inside, parameter groups have `settings`: a training loop has set those of the next iteration by now."""
    present = _settings_of(groups)
    for group, values in zip(groups, settings, strict=True):
        group.update(values)
    try:
        yield
    finally:
        for group, values in zip(groups, present, strict=True):
            group.update(values)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy that takes no memory of a device."""
    return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
