"""A stage of Megatron's in a stream of batches: each micro-batch on its batch's weight version."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from evenpipe.megatron.stage import Batch, MegatronStage
from evenpipe.megatron.supported import CoreRelease
from evenpipe.megatron.two_buffered.inputs import ReadAhead
from evenpipe.megatron.two_buffered.step import TwoBuffered
from evenpipe.schedule import Schedule, Unit, required_version

__all__ = ["StreamStage"]


class StreamStage(MegatronStage):
    """Micro-batches are numbered along the stream, which begins with `first`, a batch as `TwoBuffered` counts."""

    def __init__(
        self,
        batch: Batch,
        schedule: Schedule,
        stage: int,
        device: torch.device,
        release: CoreRelease,
        two_buffered: TwoBuffered,
        inputs: ReadAhead,
    ) -> None:
        super().__init__(batch, schedule, stage, device, release)
        self._two_buffered = two_buffered
        self._read_ahead = inputs
        self._first = two_buffered.batch
        self._sync = _LastBackwardSync(batch.config)

    def start_batch(self, batch: Batch) -> None:
        """The call of the next batch begins."""
        first = (self._two_buffered.batch - self._first) * batch.num_microbatches
        source = self._read_ahead.start_batch(batch.data_iterators[0], first)
        self._batch = batch._replace(data_iterators=[source])
        self.losses = []
        self._two_buffered.start_call()

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        number = self._batch_of(unit)
        self._two_buffered.versions.use(required_version(number))
        self._read_ahead.start_forward(unit.micro_batch, number > self._two_buffered.batch)
        return super().forward(unit, inputs)

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        place = unit.micro_batch % self._batch.num_microbatches
        if place == 0:
            self._two_buffered.before_first_backward()
            self._sync.start()
        if place == self._batch.num_microbatches - 1:
            self._sync.finish()
        self._two_buffered.versions.use(required_version(self._batch_of(unit)))
        return super().backward(unit, gradients)

    def update(self, batch: int) -> None:
        """Finish the step of the batch before, the only one that can be submitted."""
        self._two_buffered.finish()

    def forget(self) -> None:
        """Let go of what has been forwarded and not backwarded."""
        self._inputs.clear()
        self._outputs.clear()

    def _batch_of(self, unit: Unit) -> int:
        return self._first + unit.micro_batch // self._batch.num_microbatches


class _LastBackwardSync:
    """Megatron's hooks reduce gradients between replicas during the last backward of a batch, and in no other."""

    def __init__(self, config: Any) -> None:
        no_sync = config.no_sync_func
        self._no_sync = no_sync[0] if isinstance(no_sync, Sequence) else no_sync or nullcontext
        self._disabled = ExitStack()

    def start(self) -> None:
        """Before the first backward of a batch."""
        context: AbstractContextManager[Any] = self._no_sync()
        self._disabled.enter_context(context)

    def finish(self) -> None:
        """Before the last."""
        self._disabled.close()

    def before_forward(self) -> None:
        """Forwards reduce nothing."""

    def before_backward(self) -> None:
        """`start` and `finish` are called where it matters."""

    def after_backward(self) -> None:
        """What the hooks did not reduce, the submitted step does."""
