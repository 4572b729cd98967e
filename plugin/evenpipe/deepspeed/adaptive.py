"""Adaptive kFkB in DeepSpeed's engine: k, and with leave b, measured, chosen and chosen again while training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.measuring import MeasuringEngine
from evenpipe.deepspeed.section import NAME, SectionError
from evenpipe.deepspeed.stage import EngineStage, tensors_of
from evenpipe.deepspeed.static_memory import static_bytes
from evenpipe.planner.group_memory import Measured, PlanError, divisors
from evenpipe.planner.grouped import GroupedSchedule, average_ms
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import Unit
from evenpipe.tuner.loop import AdaptiveLoop
from evenpipe.tuner.process_memory import storage_bytes
from evenpipe.tuner.samples import CutError, micro_batches_of
from evenpipe.upstream.ending import end_job

__all__ = ["AdaptiveEngine"]

#: Micro-batches that are timed, after one that loads kernels and fills caches.
_TIMED: Final = 3


class AdaptiveEngine(MeasuringEngine):
    """The engine of a section whose group size is "auto".

    The first batches train in groups of one, and are measured. From then on, between two batches where nothing is under
    way, all ranks measure their links and rank 0 decides. With "micro_batch_size": "auto" a batch has the same samples
    in the same order in micro-batches of the chosen size. With DeepSpeed's `dynamic_shape`, the largest so far counts.
    """

    data_iterator: Any
    loop: AdaptiveLoop
    _state_name: ClassVar[str] = "evenpipe_tuner"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self)
        self.loop = AdaptiveLoop(self.evenpipe.retune_interval, print_once, _log_resumed, alone=False)
        self._size: int = self.micro_batch_size  # of the last batch's micro-batches
        self.measurements = _Measurements(self.executor)
        self._start_loop()

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, with the group size and the micro-batch size of the moment."""
        if self._given != (self.micro_batch_size, self.micro_batches):
            self._start_loop()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        measures = self.loop.wanted is not None
        self._stage_type = _MeasuredStage if measures else _WeighedStage if self.dynamic_shape else EngineStage
        if self.loop.wanted is not None:
            size, self.group_size = self.loop.wanted, 1
        else:
            chosen = self.loop.choose(self.executor, self.global_steps, self.micro_batch_size * self.micro_batches)
            size, self.group_size = chosen.b, chosen.k
        if size != self._size:
            self._size = size
            self.reset_activation_shape()
        try:
            with self._measuring(measures), self._in_micro_batches_of(size):
                loss = super().train_batch()
        except CutError as error:
            end_job(f'{NAME}.micro_batch_size: "auto": {error}: leave it out')
        if measures and self.measurements.complete:
            self._end_measuring()
        elif self.dynamic_shape and not measures:
            largest = self.measurements.largest(self._boundary.nbytes)
            self.loop.note(largest, self.executor, self.global_steps - 1)
        return loss

    def _go_on_by(self, state: Mapping[str, Any] | None) -> None:
        self.loop.load_state_dict(state)
        self._start_loop()

    def _start_loop(self) -> None:
        """Measure what batches are made of now; the next ones train in groups of one."""
        self._given = size, count = self.micro_batch_size, self.micro_batches
        sizes = divisors(size * count) if self.evenpipe.micro_batch_size == "auto" else [size]
        schedule = GroupedSchedule(self._programs, self.num_stages)
        self.loop.start(schedule, size * count, sizes, self._limit_bytes, self.dynamic_shape)
        self.measurements = self.measurements.anew(self.dynamic_shape)

    def _end_measuring(self) -> None:
        """Have the loop take what was measured, and go on to the next size, or to tuning."""
        held_bytes = static_bytes(self) + self.executor.connections.device_bytes
        measured = self.measurements.summary(self._boundary.nbytes, held_bytes, self.dynamic_shape)
        self.measurements = self.measurements.anew(self.dynamic_shape)
        try:
            self.loop.take(measured, self.executor, self.global_steps)
        except PlanError as error:
            given = self.evenpipe.memory_gib
            where = f'{NAME}.group_size: "auto"' if given is None else f"{NAME}.memory_gib: {given:g}"
            end_job(f"{where}: {error}")

    @contextmanager
    def _in_micro_batches_of(self, size: int) -> Iterator[None]:
        """Within it the engine is one of micro-batches of `size` samples, and of as many more or fewer of them."""
        source = self.data_iterator
        given, count = self._given
        self._resize(size, given * count // size)
        self.data_iterator = micro_batches_of(size, given, source)
        try:
            yield
        finally:
            self._resize(given, count)
            self.data_iterator = source

    def _resize(self, size: int, count: int) -> None:
        self.micro_batch_size = self._config.train_micro_batch_size_per_gpu = size
        self.micro_batches = self._config.gradient_accumulation_steps = count


class _Measurements:
    """The time and memory of one stage for micro-batches of one size, which train while the executor measures."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.forwards: list[tuple[Any, Any]] = []
        self.backwards: list[tuple[Any, Any]] = []
        self.messages: list[int] = []
        self.held: list[int] = []
        #: Of the inputs of those that have been weighed.
        self.shapes: set[tuple[torch.Size, ...]] = set()

    def anew(self, keep: bool) -> _Measurements:
        """With nothing timed yet; what has been weighed may be kept."""
        found = _Measurements(self.executor)
        if keep:
            found.held, found.shapes = self.held, self.shapes
        return found

    @contextmanager
    def timed(self, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        """Add the span of what runs inside to `spans`."""
        start = self.executor.clock.mark()
        yield
        spans.append((start, self.executor.clock.mark()))

    @property
    def complete(self) -> bool:
        """Return whether enough batches have been measured."""
        return len(self.backwards) > _TIMED

    def largest(self, message_bytes: int) -> Measured:
        """Return the most that one of the micro-batches has needed."""
        return Measured(0, 0, max(self.held, default=0), 0, message_bytes, 0, 0)

    def summary(self, message_bytes: int, static_bytes: int, differ: bool) -> Measured:
        """Return what the micro-batches show but the first, which loads kernels and fills caches.

        Where they `differ`, the largest counts: what two of them save says nothing of what they share. Times are the
        largest one's too: as much longer than the mean as its messages are.
        """
        stretch = message_bytes / fmean(self.messages[1:])
        forward_ms, backward_ms = (
            stretch * average_ms(self.executor.clock.elapsed_ms(start, end) for start, end in spans[1:])
            for spans in (self.forwards, self.backwards)
        )
        # The first to save what others save too counts as holding it.
        each, most = max(self.held) if differ else min(self.held), max(self.held)
        return Measured(forward_ms, backward_ms, each, most - each, message_bytes, 0, static_bytes)


class _WeighedStage(EngineStage):
    """Trains as ever, and has its micro-batches weighed for the engine, where their inputs have shapes that are new."""

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Weighed."""
        found: _Measurements = self._engine.measurements
        taken = tensors_of(self._engine.pipe_buffers["inputs"][self._buffer_of(unit)]) if inputs is None else inputs
        shapes = tuple(tensor.shape for tensor in taken)
        if shapes in found.shapes:
            return super().forward(unit, inputs)
        found.shapes.add(shapes)
        with found.executor.store.recording(unit):
            results = super().forward(unit, inputs)
            self._weigh(unit)
        return results

    def _weigh(self, unit: Unit) -> None:
        """Note the bytes that autograd saves, and those that the engine keeps beside them until the backward."""
        found: _Measurements = self._engine.measurements
        buffer = self._buffer_of(unit)
        kept = [tensor for of_kind in self._engine.pipe_buffers.values() for tensor in tensors_of(of_kind[buffer])]
        beside = storage_bytes(tensor for tensor in kept if isinstance(tensor, Tensor))
        found.held.append(found.executor.store.nbytes(unit) + beside)


class _MeasuredStage(_WeighedStage):
    """Trains as ever, and has all its micro-batches weighed, and timed."""

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Timed; then weighed, as all are in a batch that the executor measures."""
        found: _Measurements = self._engine.measurements
        with found.timed(found.forwards):
            results = EngineStage.forward(self, unit, inputs)
        found.messages.append(max(sum(one.nbytes for one in given) for given in (inputs or [], results)))
        self._weigh(unit)
        return results

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Timed."""
        found: _Measurements = self._engine.measurements
        with found.timed(found.backwards):
            return super().backward(unit, gradients)


def _refuse(engine: AdaptiveEngine) -> None:
    """Raise SectionError for the first setting of an initialized engine under which groups cannot be tuned."""
    if engine.module.dynamic_shape and engine.evenpipe.micro_batch_size == "auto":
        raise SectionError(
            "micro_batch_size",
            '"auto": samples of PipelineModule(dynamic_shape=True) differ in shape from one micro-batch to the next, '
            "and cannot be put together anew: leave it out, and only group_size is chosen",
        )


def _log_resumed(resumes: bool) -> None:
    others = "the checkpoint is of other batches, memory or limits: tunes anew"
    print_once(f'group_size "auto": {"goes on tuning as it was saved" if resumes else others}')
