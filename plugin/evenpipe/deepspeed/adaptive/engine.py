"""DeepSpeed's pipeline engine with groups of micro-batches whose size is chosen while training."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from evenpipe.deepspeed.adaptive.exploration import Explored, explore
from evenpipe.deepspeed.adaptive.measured import Measured, MeasuredStage, Notes
from evenpipe.deepspeed.adaptive.refusals import refuse_for_tuning
from evenpipe.deepspeed.adaptive.static_memory import static_bytes
from evenpipe.deepspeed.boundary import Boundary
from evenpipe.deepspeed.engine import EvenPipeEngine, goes_on
from evenpipe.deepspeed.saying import tell
from evenpipe.deepspeed.section import NAME
from evenpipe.deepspeed.stage import EngineStage
from evenpipe.planner import PlanError
from evenpipe.schedule import Unit
from evenpipe.tuner.conditions import Conditions
from evenpipe.tuner.limit import limit_bytes
from evenpipe.tuner.samples import CutError, micro_batches_of
from evenpipe.tuner.told import Teller
from evenpipe.tuner.tuner import Tuner
from evenpipe.upstream.ending import end_job

__all__ = ["AdaptiveEngine"]

_STATE: Final = "evenpipe_tuner"


class AdaptiveEngine(EvenPipeEngine):
    """The engine of a section whose group size is "auto".

    The first batches train in groups of one, and are measured. From then on, between two batches where nothing is under
    way, all ranks measure their links and rank 0 decides. With "micro_batch_size": "auto" a batch has the same samples
    in the same order in micro-batches of the chosen size.
    """

    data_iterator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_for_tuning(self)
        self._limit_bytes = limit_bytes(self.evenpipe.memory_gib, self.device)
        self._teller = Teller(tell)
        self._state: dict[str, Any] | None = None
        self._size: int = self.micro_batch_size  # of the last batch's micro-batches
        self._start_anew()

    @property
    def tuner(self) -> Tuner | None:
        """What decides; None while the first batches are measured."""
        return None if self._explored is None else self._explored.tuner

    @property
    def predicted_saved_bytes(self) -> tuple[int, ...]:
        """Per stage, the most that the candidates hold of micro-batches that have been decided for."""
        assert self._explored is not None, "nothing has been tuned yet"
        return self._explored.conditions.predicted_saved_bytes(self._explored.tuner.used)

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, with the group size and the micro-batch size of the moment."""
        if self._given != (self.micro_batch_size, self.micro_batches):
            self._start_anew()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self._explored is not None:
            size, self.group_size = self._decided(self._explored)
        else:
            size, self.group_size = self._asked_for, 1
        if size != self._size:
            self._size = size
            self.reset_activation_shape()
        try:
            with self._measuring(self._explored is None), self._in_micro_batches_of(size):
                loss = super().train_batch()
        except CutError as error:
            end_job(f'{NAME}.micro_batch_size: "auto": {error}: leave it out')
        if self._explored is None:
            self._note()
        return loss

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """DeepSpeed's, with the tuner's state in the client's."""
        client_state = dict(client_state or {})
        if self._explored is not None:
            client_state[_STATE] = self._explored.conditions.state_dict(self._explored.tuner)
        return super().save_checkpoint(save_dir, tag, client_state, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; the run goes on tuning as the one that saved, if batches, limit and memory are the same."""
        path, client_state = super().load_checkpoint(*args, **kwargs)
        if path is not None:
            state = client_state.pop(_STATE, None)
            self._state = state if goes_on(self, *args, **kwargs) else None
            self._start_anew()
        return path, client_state

    def _start_anew(self) -> None:
        self._given = self.micro_batch_size, self.micro_batches
        self._explored: Explored | None = None
        samples = self.micro_batch_size * self.micro_batches
        sizes = [self.micro_batch_size]
        if self.evenpipe.micro_batch_size == "auto":
            sizes = [size for size in range(1, samples + 1) if samples % size == 0]
        self._exploration: Generator[int, Measured, Explored] = explore(
            samples, sizes, self.evenpipe.bpipe, self._limit_bytes, self.evenpipe.retune_interval, self._resumed(sizes)
        )
        self._asked_for: int = next(self._exploration)
        self._notes = Notes(self.executor)

    def _resumed(self, sizes: list[int]) -> Callable[[Conditions], Tuner | None]:
        def resumed(conditions: Conditions) -> Tuner | None:
            if self._state is None:
                return None
            state, self._state = self._state, None
            tuner = conditions.resumed(state, sizes, self.evenpipe.retune_interval, self.global_steps)
            others = "the checkpoint is of other batches, memory or limits: tunes anew"
            tell(f'group_size "auto": {others if tuner is None else "goes on tuning as it was saved"}')
            return tuner

        return resumed

    def _decided(self, explored: Explored) -> tuple[int, int]:
        """The micro-batch size and the group size of this batch."""
        conditions, tuner = explored
        if tuner.due(self.global_steps):
            start = time.monotonic()
            decided = conditions.retune(tuner, self.executor.connections, self.stage_id, self.global_steps, self.device)
            self._teller.retuned(decided, time.monotonic() - start)
        assert tuner.current is not None
        return tuner.current.b, tuner.current.k

    def _note(self) -> None:
        """After a batch that was measured: if it is enough, go on to the next size, or to tuning."""
        if not self._notes.enough:
            return
        static = static_bytes(self.module, self.optimizer, self.device)
        measured = self._notes.measured(self.num_stages, self._boundary.nbytes, static)
        self._notes = Notes(self.executor)
        try:
            self._asked_for = self._exploration.send(measured)
        except StopIteration as done:
            self._explored = done.value
        except PlanError as error:
            given = self.evenpipe.memory_gib
            where = f'{NAME}.group_size: "auto"' if given is None else f"{NAME}.memory_gib: {given:g}"
            end_job(f"{where}: {error}")
        if self.device.type == "cuda":
            # Blocks of sizes that will not be asked for again.
            torch.cuda.empty_cache()

    def _make_stage(self, boundary: Boundary, buffer_of: Callable[[Unit], int], evicts: bool) -> EngineStage:
        if self._explored is None:
            return MeasuredStage(self._notes, self, boundary, buffer_of, evicts)
        return super()._make_stage(boundary, buffer_of, evicts)

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
