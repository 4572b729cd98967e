"""Adaptive kFkB in DeepSpeed's engine: k, and with leave b, measured, chosen and chosen again while training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor

from evenpipe.deepspeed.engine import EvenPipeEngine, resumes_training
from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.section import NAME, SectionError
from evenpipe.deepspeed.stage import EngineStage, tensors_of
from evenpipe.deepspeed.static_memory import static_bytes
from evenpipe.planner.candidates import PlanError, divisors
from evenpipe.planner.grouped import GroupedSchedule, average_ms
from evenpipe.planner.memory import Measured
from evenpipe.runtime.executor import Executor
from evenpipe.schedule import Unit
from evenpipe.settings.contradictions import CONTRADICTIONS_ON_CPU, contradiction_in
from evenpipe.settings.spelling import SECTION
from evenpipe.tuner.loop import AdaptiveLoop
from evenpipe.tuner.process_memory import limit_bytes, storage_bytes
from evenpipe.tuner.samples import CutError, micro_batches_of
from evenpipe.upstream.ending import end_job

__all__ = ["AdaptiveEngine"]

_STATE: Final = "evenpipe_tuner"
#: Micro-batches that are timed, after one that loads kernels and fills caches.
_TIMED: Final = 3


class AdaptiveEngine(EvenPipeEngine):
    """The engine of a section whose group size is "auto".

    The first batches train in groups of one, and are measured. From then on, between two batches where nothing is under
    way, all ranks measure their links and rank 0 decides. With "micro_batch_size": "auto" a batch has the same samples
    in the same order in micro-batches of the chosen size.
    """

    data_iterator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self)
        self._limit_bytes = limit_bytes(self.evenpipe.memory_gib, self.device)
        self.loop = AdaptiveLoop(self.evenpipe.retune_interval, print_once, _log_resumed, alone=False)
        self._size: int = self.micro_batch_size  # of the last batch's micro-batches
        self._start_loop()

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, with the group size and the micro-batch size of the moment."""
        if self._given != (self.micro_batch_size, self.micro_batches):
            self._start_loop()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        measures = self.loop.wanted is not None
        self._stage_type = _MeasuredStage if measures else EngineStage
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
        return loss

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """DeepSpeed's, with the tuner's state in the client's."""
        client_state = dict(client_state or {})
        if (state := self.loop.state_dict()) is not None:
            client_state[_STATE] = state
        return super().save_checkpoint(save_dir, tag, client_state, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; the run goes on tuning as the one that saved, if batches, limit and memory are the same."""
        path, client_state = super().load_checkpoint(*args, **kwargs)
        if path is not None:
            state = client_state.pop(_STATE, None)
            self.loop.load_state_dict(state if resumes_training(self, *args, **kwargs) else None)
            self._start_loop()
        return path, client_state

    def _start_loop(self) -> None:
        """Measure what batches are made of now; the next ones train in groups of one."""
        self._given = size, count = self.micro_batch_size, self.micro_batches
        sizes = divisors(size * count) if self.evenpipe.micro_batch_size == "auto" else [size]
        schedule = GroupedSchedule(self._programs, self.num_stages)
        self.loop.start(schedule, size * count, sizes, self._limit_bytes)
        self.measurements = _Measurements(self.executor)

    def _end_measuring(self) -> None:
        """Have the loop take what was measured, and go on to the next size, or to tuning."""
        held_bytes = static_bytes(self) + self.executor.connections.device_bytes
        measured = self.measurements.summary(self._boundary.nbytes, held_bytes)
        self.measurements = _Measurements(self.executor)
        try:
            self.loop.take(measured, self.executor, self.global_steps)
        except PlanError as error:
            given = self.evenpipe.memory_gib
            where = f'{NAME}.group_size: "auto"' if given is None else f"{NAME}.memory_gib: {given:g}"
            end_job(f"{where}: {error}")

    @contextmanager
    def _measuring(self, measures: bool) -> Iterator[None]:
        """Within it the store knows what micro-batches save."""
        before = self.executor.measure
        self.executor.measure = before or measures
        try:
            yield
        finally:
            self.executor.measure = before

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
    """What one stage takes and holds for micro-batches of one size while they train, and the executor measures."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.forwards: list[tuple[Any, Any]] = []
        self.backwards: list[tuple[Any, Any]] = []
        self.held: list[int] = []

    @contextmanager
    def timed(self, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        """What runs inside joins `spans`."""
        start = self.executor.clock.mark()
        yield
        spans.append((start, self.executor.clock.mark()))

    @property
    def complete(self) -> bool:
        """Whether no more batches have to be measured."""
        return len(self.backwards) > _TIMED

    def summary(self, message_bytes: int, static_bytes: int) -> Measured:
        """What the micro-batches show but the first, which loads kernels and fills caches."""
        forward_ms, backward_ms = (
            average_ms(self.executor.clock.elapsed_ms(start, end) for start, end in spans[1:])
            for spans in (self.forwards, self.backwards)
        )
        # The first to save what others save too counts as holding it.
        each, most = min(self.held), max(self.held)
        return Measured(forward_ms, backward_ms, each, most - each, message_bytes, 0, static_bytes)


class _MeasuredStage(EngineStage):
    """Trains as ever, and has its micro-batches measured for the engine."""

    def forward(self, unit: Unit, inputs: list[Tensor] | None) -> list[Tensor]:
        """Timed; then weighed."""
        found: _Measurements = self._engine.measurements
        with found.timed(found.forwards):
            results = super().forward(unit, inputs)
        found.held.append(found.executor.store.nbytes(unit) + self._beside(unit))
        return results

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        """Timed."""
        found: _Measurements = self._engine.measurements
        with found.timed(found.backwards):
            return super().backward(unit, gradients)

    def _beside(self, unit: Unit) -> int:
        """Bytes that the engine keeps of a micro-batch until its backward, beside what autograd saves."""
        buffer = self._buffer_of(unit)
        kept = [tensor for of_kind in self._engine.pipe_buffers.values() for tensor in tensors_of(of_kind[buffer])]
        return storage_bytes(tensor for tensor in kept if isinstance(tensor, Tensor))


def _refuse(engine: AdaptiveEngine) -> None:
    """Raise SectionError for the first setting of an initialized engine under which groups cannot be tuned."""
    line = contradiction_in(engine.evenpipe, SECTION, CONTRADICTIONS_ON_CPU)
    if engine.device.type != "cuda" and line is not None:
        raise SectionError(None, line)
    if engine.module.dynamic_shape:
        raise SectionError(
            "group_size",
            '"auto": micro-batches of PipelineModule(dynamic_shape=True) differ in what they save, so that the memory '
            "of groups is not known: give a number",
        )


def _log_resumed(resumes: bool) -> None:
    others = "the checkpoint is of other batches, memory or limits: tunes anew"
    print_once(f'group_size "auto": {"goes on tuning as it was saved" if resumes else others}')
