"""Batches through a pipeline of plain modules without a flush between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from evenpipe.runtime.executor import Executor
from evenpipe.runtime.stage import ModuleStage
from evenpipe.schedule import Kind, Program, Stream, Unit, find, swapping
from evenpipe.torch.evaluation import check_gradients
from evenpipe.torch.plain_steps import PlainSteps
from evenpipe.torch.weighing import mean_loss
from evenpipe.two_bw.stream import BatchState, TwoBWStream

__all__ = ["TwoBWPipeline", "TwoBWTraining"]


class TwoBWPipeline(Protocol):
    """What `TwoBWTraining` asks of a pipeline."""

    program: Program
    executor: Executor
    chunks: list[nn.Module]
    batches: int
    stride: int
    is_last: bool
    losses: list[Tensor]

    def shared(self, batch: Any) -> Sequence[Any]:
        """What each micro-batch gets of a batch."""

    def made(self, item: Callable[[int], Any], found: dict[int, Tensor], first: int) -> ModuleStage:
        """A stage whose micro-batch i gets `item(i)`, and leaves its loss in `found[i]`; batch `first` has the 0th."""


class TwoBWTraining(Iterator[Tensor | None]):
    """Trains on one of `batches` after the other: gives the mean loss of each where the model ends, None elsewhere.

    Micro-batches of the next batch are forwarded before the present one's last backwards, so that `batches` is read
    one batch ahead. Batch t's step, with the learning rate that the optimizer has when its loss is given, is finished
    while batch t + 1 runs: W(t+1) = W(t) - step of the gradients at W(t-1). When `batches` have ended, or `drain` is
    called (by all ranks alike), all steps are made.
    """

    def __init__(self, pipeline: TwoBWPipeline, batches: Iterable[Any], steps: PlainSteps) -> None:
        schedule = pipeline.program.schedule
        self.steps = steps
        self._pipeline = pipeline
        self._batches = iter(batches)
        self._sizes = schedule.stages, schedule.micro_batches
        paired, swaps = bool(pipeline.program.pairs), swapping(schedule)
        self._buffers = _Buffers(pipeline.chunks, steps)
        self._two_bw = TwoBWStream(steps, find(schedule.name), paired, swaps, self._buffers)
        self._ahead: Sequence[Any] | None = None
        self._found: dict[int, Tensor] = {}
        self._items: dict[int, Sequence[Any]] = {}  # of the present batch and the next, along the stream
        self._called = 0  # batches of the stream
        steps.load_state_dict(None)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what `state_dict` gave; the pipeline's parameters have the newest weights already."""
        self.drain()
        self.steps.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the parameters and the optimizer's state; all steps are made."""
        self.drain()
        return self.steps.state_dict()

    def drain(self) -> None:
        """Finish the last step; what has been forwarded of the next batch is dropped, and forwarded again."""
        self.steps.drain()
        self._called = 0
        self._items.clear()
        self._found.clear()

    def __next__(self) -> Tensor | None:
        check_gradients()
        pipeline, count = self._pipeline, self._sizes[1]
        present = self._ahead if self._ahead is not None else self._read()
        if present is None:
            self.drain()
            raise StopIteration
        self._ahead = self._read()
        self._buffers.keep()
        # The last batch stands in for the one after it, whose forwards are dropped.
        self._items[self._called], self._items[self._called + 1] = present, self._ahead or present
        with self._two_bw.call(pipeline.executor, self._sizes, None, self._stage) as called:
            for step in called.steps:
                called.take(step)
        self.steps.submit()
        del self._items[self._called]
        first = self._called * count
        pipeline.losses = [self._found.pop(first + number) for number in range(count)] if pipeline.is_last else []
        self._called += 1
        pipeline.batches += pipeline.stride
        return mean_loss(pipeline.losses, present) if pipeline.is_last else None

    def _read(self) -> Sequence[Any] | None:
        for batch in self._batches:
            return self._pipeline.shared(batch)
        return None

    def _stage(self, stream: Stream) -> _TwoBWStage:
        count = self._sizes[1]

        def item(number: int) -> Any:
            return self._items[number // count][number % count]

        made = self._pipeline.made(item, self._found, self._pipeline.batches)
        return _TwoBWStage(made, self._two_bw, self.steps)


class _Buffers(BatchState):
    """The buffers of `chunks`, which are put back where forwards of the batch ahead of `steps` are dropped."""

    def __init__(self, chunks: Sequence[nn.Module], steps: PlainSteps) -> None:
        self._chunks = chunks
        self._steps = steps
        self._before: list[tuple[Tensor, Tensor]] = []  # and what they were before the batch ahead

    def keep(self) -> None:
        """Keep what the forwards so far have made of them."""
        self._before = []

    def use(self, batch: int) -> None:
        if batch > self._steps.batch and not self._before:
            every = (one for part in self._chunks for one in part.buffers())
            self._before = [(one, one.clone()) for one in every]

    def drop(self, first: int) -> None:
        for buffer, before in self._before:
            buffer.copy_(before)
        self.keep()


class _TwoBWStage:
    """`inner`, whose micro-batches are numbered along the stream, each on the weights that its batch needs."""

    def __init__(self, inner: ModuleStage, two_bw: TwoBWStream, steps: PlainSteps) -> None:
        self._inner = inner
        self._two_bw = two_bw
        self._steps = steps

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        return self._inner.receive_buffers(kind, unit)

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        self._two_bw.use_version_of(unit)
        outputs = self._inner.forward(unit, inputs)
        self._inner.losses.clear()
        return outputs

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        self._two_bw.use_version_of(unit)
        return self._inner.backward(unit, gradients)

    def gather(self, batch: int) -> None:
        self._steps.gather()

    def update(self, batch: int) -> None:
        self._steps.finish()

    def forget(self) -> None:
        self._inner.forget()
