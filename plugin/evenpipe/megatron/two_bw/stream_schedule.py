"""2BW's forward-backward function for megatron-core, and the stage that it drives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from evenpipe.megatron.grad_sync import Sync, without_sync
from evenpipe.megatron.schedule import Call, PipelineSchedule
from evenpipe.megatron.stage import Batch, MegatronStage
from evenpipe.megatron.two_bw.expert_losses import ExpertLosses
from evenpipe.megatron.two_bw.optimizer import TwoBWOptimizer
from evenpipe.megatron.two_bw_symbols import TWO_BW
from evenpipe.runtime.executor import Observer
from evenpipe.schedule import DelayCorrection, Spec, Stream, Unit, batch_of
from evenpipe.two_bw.inputs import ReadAhead
from evenpipe.two_bw.stream import BatchState, TwoBW
from evenpipe.upstream import verify

__all__ = ["StreamSchedule"]


class StreamSchedule(PipelineSchedule):
    """A `PipelineSchedule` that does not flush between batches; `attach` the optimizer before the first.

    A call backwards all of its batch, and forwards the first micro-batches of the next one too. So data iterators run
    ahead of the calls, by up to p − 1 micro-batches on the first stage.
    """

    offers = frozenset(["in_place", "stream"])

    def __init__(
        self,
        bpipe: bool = False,
        observer: Observer | None = None,
        measure: bool = False,
        connected: Callable[[PipelineSchedule], None] = lambda schedule: None,
        schedule: str | Spec = "2bw",
    ) -> None:
        super().__init__(schedule, bpipe, observer, measure, connected)
        verify(TWO_BW)
        self._attached: tuple[TwoBWOptimizer, TwoBW] | None = None

    @property
    def in_place(self) -> bool:
        """Return whether stages step in place, as under paci."""
        return "in_place" in self.programs.spec.needs

    def attach(
        self,
        optimizer: TwoBWOptimizer,
        losses: ExpertLosses | None = None,
        delay_correction: DelayCorrection = "none",
    ) -> TwoBW:
        """Step by `optimizer`; each batch has its own sums of auxiliary `losses`, where there are some.

        Returns what has all of 2BW that lasts between two calls: drain it before anything reads the weights.
        """
        if optimizer.versions.in_place != self.in_place:
            raise ValueError(f"{self.programs.spec.name}: make the TwoBWOptimizer with in_place={self.in_place}")
        states: list[BatchState] = [optimizer.routers, optimizer.quantised, *([] if losses is None else [losses])]
        two_bw = TwoBW(optimizer, self.programs.spec, self.bpipe, states=states, correction=delay_correction)
        optimizer.take_over(two_bw.submit)
        self._attached = optimizer, two_bw
        return two_bw

    @property
    def first_batch(self) -> int:
        """The batch with which the present stream began, counted from 0 since the weights were made or loaded."""
        assert self._attached is not None, "nothing has been scheduled yet"
        _, two_bw = self._attached
        return two_bw.first - two_bw.loaded_at

    def __call__(self, *, forward_only: bool = False, **arguments: Any) -> list[Any]:
        if forward_only and self._attached is not None:
            _, two_bw = self._attached
            two_bw.drain()
            given, reading = arguments["data_iterator"], two_bw.inputs.standing_before
            arguments["data_iterator"] = [*map(reading, given)] if isinstance(given, list) else reading(given)
        return super().__call__(forward_only=forward_only, **arguments)

    def _carry_out(self, call: Call) -> list[Any]:
        batch = call.batch
        if self._attached is None:
            raise ValueError(
                "2bw steps the optimizer itself: call schedule.attach(TwoBWOptimizer(model, optimizer)) first"
            )
        optimizer, two_bw = self._attached
        finalize = batch.config.finalize_model_grads_func
        if finalize is None or len(batch.model) > 1:
            raise ValueError(
                "2bw reduces gradients through config.finalize_model_grads_func, and has one model chunk a stage: "
                "set it, and leave virtual stages out"
            )
        place, stages = call.pipeline.rank(), call.pipeline.size()
        executor = self._executor(call.pipeline, batch)
        model = list(batch.model)  # not the batch, whose iterators would stay with the optimizer

        def finalized(groups: Any) -> None:
            finalize(model, None, **{self._release.process_groups_argument: groups})

        def make_stage(stream: Stream) -> _StreamStage:
            optimizer.start_stream(place, finalized, call.groups)
            arguments = batch, stream.program.schedule, place, executor.device, self._release
            return _StreamStage(optimizer, two_bw.inputs, *arguments)

        sizes = stages, batch.num_microbatches
        with two_bw.call(executor, sizes, batch.data_iterators[0], make_stage) as called:
            stage: _StreamStage = called.stage
            stage.start_batch(batch)
            for step in called.steps:
                called.take(step)
        return stage.losses

    def _weights(self, chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
        # Autograd saves those of whichever version a forward runs on.
        assert self._attached is not None, "it is attached before the first batch"
        return [*super()._weights(chunks), *self._attached[1].versions.memory]


class _StreamStage(MegatronStage):
    """Micro-batches are numbered along the stream; the gradients of a batch make way for the next one's."""

    def __init__(self, optimizer: TwoBWOptimizer, inputs: ReadAhead, *args: Any) -> None:
        super().__init__(*args)
        self._optimizer = optimizer
        self._read_ahead = inputs
        self._sync = Sync()
        self._without_sync = ExitStack()
        self._tokens: dict[int, Tensor] = {}  # by batch of the stream

    def start_batch(self, batch: Batch) -> None:
        """The call of the next batch begins."""
        source = None if batch.data_iterators[0] is None else self._read_ahead
        self._batch = batch._replace(data_iterators=[source])
        self.losses = []

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        self._read_ahead.start_forward()
        batch = batch_of(unit.micro_batch, self._batch.num_microbatches)
        self.tokens = self._tokens.setdefault(batch, torch.zeros_like(self.tokens))
        return super().forward(unit, inputs)

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        place = unit.micro_batch % self._batch.num_microbatches
        # Megatron's hooks reduce gradients between replicas during the last backward of a batch, and in no other. What
        # they did not reduce, the submitted step does.
        if place == 0:
            self._optimizer.before_first_backward()
            self._without_sync = without_sync(self._batch.config)
        if place == self._batch.num_microbatches - 1:
            self._without_sync.close()
            tokens = self._tokens.pop(batch_of(unit.micro_batch, self._batch.num_microbatches))
            if self._batch.config.calculate_per_token_loss:
                self._optimizer.count(tokens)
        return super().backward(unit, gradients)

    def forget(self) -> None:
        """Let go of what has been forwarded and not backwarded."""
        self._inputs.clear()
        self._outputs.clear()
        self._sent.clear()
