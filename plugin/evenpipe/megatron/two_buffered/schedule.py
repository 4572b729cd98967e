"""2BW's forward-backward function for megatron-core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from evenpipe.megatron.schedule import Call, PipelineSchedule
from evenpipe.megatron.two_buffered.inputs import ReadAhead
from evenpipe.megatron.two_buffered.relied_on import verify_relied_on
from evenpipe.megatron.two_buffered.stage import StreamStage
from evenpipe.megatron.two_buffered.step import Settled, TwoBuffered
from evenpipe.runtime.executor import Observer
from evenpipe.schedule import Spec, Stream

__all__ = ["StreamSchedule"]


class StreamSchedule(PipelineSchedule):
    """A `PipelineSchedule` that does not flush between batches; `attach` the optimizer before the first.

    A call backwards all of its batch, and forwards the first micro-batches of the next one too. So data iterators run
    ahead of the calls, by up to p − 1 micro-batches on the first stage.
    """

    offers = frozenset(["stream"])

    def __init__(
        self,
        bpipe: bool = False,
        observer: Observer | None = None,
        measure: bool = False,
        connected: Callable[[PipelineSchedule], None] = lambda schedule: None,
        schedule: str | Spec = "2bw",
    ) -> None:
        super().__init__(schedule, bpipe, observer, measure, connected)
        verify_relied_on()
        self.two_buffered: TwoBuffered | None = None
        self._inputs = ReadAhead()
        self._stream: Stream | None = None
        self._stage: StreamStage | None = None
        self._called = 0  # batches of the stream

    def attach(self, two_buffered: TwoBuffered) -> None:
        """Whose optimizer steps."""
        self.two_buffered = two_buffered

    def __call__(self, *, forward_only: bool = False, **arguments: Any) -> list[Any]:
        if forward_only and self.two_buffered is not None:
            self.two_buffered.drain()
        return super().__call__(forward_only=forward_only, **arguments)

    def _carry_out(self, call: Call) -> list[Any]:
        if self.two_buffered is None:
            raise ValueError(
                "2bw steps the optimizer itself: call schedule.attach(TwoBuffered(model, optimizer)) first"
            )
        if call.batch.config.finalize_model_grads_func is None or len(call.batch.model) > 1:
            raise ValueError(
                "2bw reduces gradients through config.finalize_model_grads_func, and has one model chunk a stage: "
                "set it, and leave virtual stages out"
            )
        batch, stages, stage = call.batch, call.pipeline.size(), call.pipeline.rank()
        executor = self._executor(call.pipeline, list(batch.model))
        if self._stream is not None and self._stream.micro_batches != batch.num_microbatches:
            self.two_buffered.drain()
        if self._stream is None or self._stage is None:
            self._stream = Stream(self.programs.spec, stages, batch.num_microbatches, self.bpipe)
            self._called = 0
            self._stage = StreamStage(
                batch,
                self._stream.program.schedule,
                stage,
                executor.device,
                self._release,
                self.two_buffered,
                self._inputs,
            )
            settled = Settled(
                stage, batch.config.finalize_model_grads_func, self._release.process_groups_argument, call.groups
            )
            self.two_buffered.settle(settled, self._break_off)
        self._stage.start_batch(batch)
        steps = self._stream.call(stage, self._called, self.two_buffered.update_early)
        executor.advance(self._stream.program, steps, self._stage)
        self._called += 1
        # Outside of a call the parameters are what the last finished step made of them.
        self.two_buffered.versions.use(self.two_buffered.versions.latest)
        return self._stage.losses

    @property
    def first_batch(self) -> int:
        """The batch with which the present stream began, counted from 0 since the weights were made or loaded."""
        assert self.two_buffered is not None, "nothing has been scheduled yet"
        return self.two_buffered.submitted - self._called

    def _weights(self, chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
        # A forward points its parameters at its version when it is being recorded already.
        assert self.two_buffered is not None, "it is attached before the first batch"
        return [*super()._weights(chunks), *self.two_buffered.versions.memory]

    def _break_off(self) -> None:
        """End the stream between two calls; the next one starts anew, and reads again what this one read ahead."""
        if self.executor is None or self._stream is None or self._stage is None:
            return
        self.executor.break_off(self._stream.owed(self.executor.stage_index, self._called - 1))
        self._stage.forget()
        self._inputs.rewind(self._called * self._stream.micro_batches)
        self._stream = self._stage = None
