"""Adaptive kFkB in DeepSpeed's engine: k, and with leave b, measured, chosen and chosen again while training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from torch import Tensor

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.measuring import MeasuringEngine
from evenpipe.deepspeed.section import NAME, SectionError
from evenpipe.planner.divisors import divisors
from evenpipe.schedule import BACKWARD, FORWARD
from evenpipe.tuner.group_memory import Measured, PlanError
from evenpipe.tuner.grouped import GroupedSchedule
from evenpipe.tuner.loop import AdaptiveLoop
from evenpipe.tuner.part_watch import measured_by
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
        self._start_loop()

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, with the group size and the micro-batch size of the moment."""
        if self._given != (self.micro_batch_size, self.micro_batches):
            self._start_loop()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        measures = self.loop.wanted is not None
        weighs = measures or self.dynamic_shape
        self._watch.timed, self._watch.store = measures, self.executor.store if weighs else None
        if self.loop.wanted is not None:
            size, self.group_size = self.loop.wanted, 1
        else:
            chosen = self.loop.choose(self.executor, self.global_steps, self.micro_batch_size * self.micro_batches)
            size, self.group_size = chosen.b, chosen.k
        if size != self._size:
            self._size = size
            self.reset_activation_shape()
        try:
            with self._in_micro_batches_of(size):
                loss = super().train_batch()
        except CutError as error:
            end_job(f'{NAME}.micro_batch_size: "auto": {error}: leave it out')
        if measures and len(self._watch.ms[BACKWARD, 0]) > _TIMED:
            self._end_measuring()
        elif weighs and not measures:
            largest = Measured(0, 0, max(self._watch.nbytes[FORWARD, 0]), 0, self._boundary.nbytes, 0, 0)
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
        self._forget()

    def _forget(self) -> None:
        if not self.dynamic_shape:
            self._watch.clear()

    def _end_measuring(self) -> None:
        """Have the loop take what was measured, and go on to the next size, or to tuning."""
        measured = self._measured()
        self._forget()
        try:
            self.loop.take(measured, self.executor, self.global_steps)
        except PlanError as error:
            given = self.evenpipe.memory_gib
            where = f'{NAME}.group_size: "auto"' if given is None else f"{NAME}.memory_gib: {given:g}"
            end_job(f"{where}: {error}")

    def _measured(self) -> Measured:
        return measured_by(self._watch, self._boundary.nbytes, self._static_bytes(), self.dynamic_shape)

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
