"""A stage's batches in one stream without flushes: how it begins, goes on from call to call, and is broken off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from evenpipe.runtime.executor import Executor
from evenpipe.runtime.stage import SteppingStage
from evenpipe.schedule import Spec, Step, Stream, Unit, required_version
from evenpipe.two_bw.inputs import ReadAhead
from evenpipe.two_bw.steps import TwoBWSteps

__all__ = ["BatchState", "Call", "StreamStage", "TwoBWStream"]


class StreamStage(SteppingStage, Protocol):
    """A framework's stage; micro-batches are numbered along the stream."""

    def forget(self) -> None:
        """Let go of what has been forwarded and not backwarded."""


class BatchState(Protocol):
    """What forwards leave in a model beside their outputs, such as buffers and sums of losses; of each batch apart."""

    def use(self, batch: int) -> None:
        """A unit of `batch`, as the steps count, is about to be computed."""

    def drop(self, first: int) -> None:
        """The forwards of `first` and later batches are dropped, and will be computed again."""


class Call(NamedTuple):
    """One batch: its `steps` in `stream`, and what carries out the next of them."""

    stream: Stream
    steps: list[Step]
    take: Callable[[Step], None]


class TwoBWStream:
    """One stage's stream; it ends when `steps` are drained, and the next call begins another.

    A call backwards all of its batch, and forwards the first micro-batches of the next one too. So `inputs` run ahead
    of the calls, by up to p - 1 micro-batches on the first stage.
    """

    def __init__(
        self,
        steps: TwoBWSteps,
        spec: Spec,
        bpipe: bool,
        swaps: Collection[int] = (),
        state: BatchState | None = None,
    ) -> None:
        self.inputs = ReadAhead()
        #: The batch with which the present stream began, as `steps` count.
        self.first = 0
        #: What `make_stage` made for the present stream.
        self.stage: StreamStage | None = None
        self._steps = steps
        self._spec = spec
        self._bpipe = bpipe
        self._swaps = swaps
        self._state = state
        self._stream: Stream | None = None
        self._executor: Executor | None = None
        self._called = 0  # batches of the stream
        steps.break_off = self.break_off

    @contextmanager
    def call(
        self,
        executor: Executor,
        sizes: tuple[int, int],
        source: Iterator[Any] | None,
        make_stage: Callable[[Stream], StreamStage],
    ) -> Iterator[Call]:
        """The next batch of a pipeline of `sizes` (stages, micro-batches), to be carried out inside.

        Goes on with the stream if that has these sizes; else `make_stage` makes the stage of a new one. `source` is
        the data iterator, where this process reads. Raises InputError for one that cannot be, before anything is done.
        """
        if self._stream is not None and self._stream.micro_batches != sizes[1]:
            self._steps.drain()
        if self._stream is None or self.stage is None:
            self._executor, self._called, self.first = executor, 0, self._steps.batch
            self._stream = Stream(self._spec, *sizes, self._bpipe, executor.connections.queues, self._swaps)
            self.stage = make_stage(self._stream)
            if self._steps.exchange is not None:
                executor.connections.compare(self._steps.exchange.named)
        self.inputs.start_batch(source, sizes[1])
        self._steps.start_batch()
        stage = executor.stage_index
        steps = self._stream.call(stage, self._called, self._steps.update_early(stage))
        with executor.stretch(self._stream.program, self.stage) as take:
            yield Call(self._stream, steps, take)
        self._called += 1
        # Outside of a call the parameters are what the last finished step made of them.
        self._steps.versions.use(self._steps.versions.latest)

    def use_version_of(self, unit: Unit) -> None:
        """Point the parameters at the weights that all of the unit's batch uses."""
        assert self._stream is not None, "a call is being carried out"
        batch = self.first + unit.micro_batch // self._stream.micro_batches
        self._steps.versions.use(required_version(batch))
        if self._state is not None:
            self._state.use(batch)

    def break_off(self) -> None:
        """Settle what other stages are owed, and drop what has been forwarded; the last step stays to be made.

        Waits for nothing that another stage has not started yet. The next call reads again what this one read ahead.
        """
        if self._stream is None or self.stage is None or self._executor is None:
            return
        self._executor.break_off(self._stream.owed(self._executor.stage_index, self._called - 1))
        self.stage.forget()
        if self._state is not None:
            self._state.drop(self._steps.batch)
        self.inputs.rewind()
        self._stream = self.stage = self._executor = None
