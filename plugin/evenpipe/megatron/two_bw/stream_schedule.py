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
from evenpipe.megatron.supported import CoreRelease
from evenpipe.megatron.two_bw.expert_losses import ExpertLosses
from evenpipe.megatron.two_bw.optimizer import TwoBWOptimizer
from evenpipe.megatron.two_bw_symbols import TWO_BW
from evenpipe.runtime.executor import Observer
from evenpipe.schedule import Schedule, Spec, Stream, Unit
from evenpipe.two_bw.stream import TwoBWStream
from evenpipe.upstream import verify

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
        verify(TWO_BW)
        self.two_bw: TwoBWOptimizer | None = None
        self._batches: TwoBWStream | None = None

    def attach(self, two_bw: TwoBWOptimizer, losses: ExpertLosses | None = None) -> None:
        """Whose optimizer steps; each batch has its own sums of auxiliary `losses`, where there are some."""
        self.two_bw = two_bw
        self._batches = TwoBWStream(two_bw, self.programs.spec, self.bpipe, state=losses)
        if losses is not None:
            two_bw.gather_too.append(lambda: losses.gather(two_bw.batch - 1))

    @property
    def first_batch(self) -> int:
        """The batch with which the present stream began, counted from 0 since the weights were made or loaded."""
        assert self.two_bw is not None, "nothing has been scheduled yet"
        assert self._batches is not None, "it comes with the optimizer"
        return self._batches.first - self.two_bw.loaded_at

    def __call__(self, *, forward_only: bool = False, **arguments: Any) -> list[Any]:
        if forward_only and self.two_bw is not None and self._batches is not None:
            self.two_bw.drain()
            given, reading = arguments["data_iterator"], self._batches.inputs.standing_before
            arguments["data_iterator"] = [*map(reading, given)] if isinstance(given, list) else reading(given)
        return super().__call__(forward_only=forward_only, **arguments)

    def _carry_out(self, call: Call) -> list[Any]:
        batch, two_bw, batches = call.batch, self.two_bw, self._batches
        if two_bw is None or batches is None:
            raise ValueError(
                "2bw steps the optimizer itself: call schedule.attach(TwoBWOptimizer(model, optimizer)) first"
            )
        finalize = batch.config.finalize_model_grads_func
        if finalize is None or len(batch.model) > 1:
            raise ValueError(
                "2bw reduces gradients through config.finalize_model_grads_func, and has one model chunk a stage: "
                "set it, and leave virtual stages out"
            )
        stage, stages = call.pipeline.rank(), call.pipeline.size()
        executor = self._executor(call.pipeline, batch)
        model = list(batch.model)  # not the batch, whose iterators would stay with the optimizer

        def finalized(groups: Any) -> None:
            finalize(model, None, **{self._release.process_groups_argument: groups})

        def start(stream: Stream) -> _StreamStage:
            two_bw.start_stream(stage, finalized, call.groups)
            return _StreamStage(batch, stream.program.schedule, stage, executor.device, self._release, two_bw, batches)

        with batches.call(executor, (stages, batch.num_microbatches), batch.data_iterators[0], start) as called:
            begun = batches.stage
            assert isinstance(begun, _StreamStage), "the stream has begun"
            begun.start_batch(batch)
            for step in called.steps:
                called.take(step)
        return begun.losses

    def _weights(self, chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
        # A forward points its parameters at its version when it is being recorded already.
        assert self.two_bw is not None, "it is attached before the first batch"
        return [*super()._weights(chunks), *self.two_bw.versions.memory]


class _StreamStage(MegatronStage):
    """Each micro-batch on its batch's weight version; they are numbered along the stream."""

    def __init__(
        self,
        batch: Batch,
        schedule: Schedule,
        stage: int,
        device: torch.device,
        release: CoreRelease,
        two_bw: TwoBWOptimizer,
        batches: TwoBWStream,
    ) -> None:
        super().__init__(batch, schedule, stage, device, release)
        self._two_bw = two_bw
        self._batches = batches
        self._sync = _LastBackwardSync(batch.config)

    def start_batch(self, batch: Batch) -> None:
        """The call of the next batch begins."""
        source = None if batch.data_iterators[0] is None else self._batches.inputs
        self._batch = batch._replace(data_iterators=[source])
        self.losses = []

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        self._batches.use_version_of(unit)
        self._batches.inputs.start_forward()
        return super().forward(unit, inputs)

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        place = unit.micro_batch % self._batch.num_microbatches
        if place == 0:
            self._two_bw.before_first_backward()
            self._sync.start()
        if place == self._batch.num_microbatches - 1:
            self._sync.finish()
        self._batches.use_version_of(unit)
        return super().backward(unit, gradients)

    def gather(self, batch: int) -> None:
        self._two_bw.gather()

    def update(self, batch: int) -> None:
        """Finish the step of the batch before, the only one that can be submitted."""
        self._two_bw.finish()

    def forget(self) -> None:
        """Let go of what has been forwarded and not backwarded."""
        self._inputs.clear()
        self._outputs.clear()
        self._handed_over.clear()


class _LastBackwardSync(Sync):
    """Megatron's hooks reduce gradients between replicas during the last backward of a batch, and in no other.

    `start` is called before the first backward of a batch, and `finish` before its last. What the hooks did not reduce,
    the submitted step does.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._disabled = ExitStack()

    def start(self) -> None:
        self._disabled = without_sync(self._config)

    def finish(self) -> None:
        self._disabled.close()
