"""A schedule searched for the run's own times in DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.measuring import MeasuringEngine
from evenpipe.deepspeed.section import NAME
from evenpipe.deepspeed.stage import tensors_of
from evenpipe.deepspeed.static_memory import static_bytes
from evenpipe.schedule import SEARCHED, Program, ScheduleError, Size, Unit
from evenpipe.tuner.part_watch import PartWatch
from evenpipe.tuner.process_memory import storage_bytes
from evenpipe.tuner.searching import Room, SearchLoop
from evenpipe.upstream.ending import end_job

__all__ = ["SearchedEngine"]


class SearchedEngine(MeasuringEngine):
    """The engine of a section whose schedule is "searched".

    Two batches train by ZB-H1 and are looked at; the others follow an order that is searched for their times and for
    the memory, as `evenpipe.tuner.searching.SearchLoop` has it.
    """

    _state_name: ClassVar[str] = "evenpipe_searched"
    loop: SearchLoop

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch.then, self.executor.observer = self.executor.observer, self._watch

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, under the order of the moment."""
        size = Size(self.num_stages, self.micro_batches)
        self.loop.begin(self.global_steps, size)
        try:
            self.loop.prepare(self.executor, size, self._programs.queues)
            with self._measuring(self.loop.weighs):
                loss: Tensor = super().train_batch(data_iter)
            self.loop.end(self.executor, self.global_steps, size, self._room)
        except ScheduleError as error:
            given = self.evenpipe.memory_gib
            where = f'{NAME}.schedule: "{SEARCHED}"' if given is None else f"{NAME}.memory_gib: {given:g}"
            end_job(f"{where}: {error}")
        return loss

    def _prepare(self) -> Any:
        self._watch = PartWatch(kept=self._kept_bytes)
        self.loop = SearchLoop(self._watch, self.evenpipe.retune_interval, _say)
        return super()._prepare()

    def _program(self, size: Size) -> Program:
        return self.loop.program(size, self._programs.queues)

    def _kept_bytes(self, unit: Unit) -> int:
        """Return bytes of what the engine keeps of a micro-batch beside what autograd saves."""
        buffer = self._schedule(self.micro_batches)[1].buffer_of(unit)
        kept = [tensor for of_kind in self.pipe_buffers.values() for tensor in tensors_of(of_kind[buffer])]
        return storage_bytes(tensor for tensor in kept if isinstance(tensor, Tensor))

    def _room(self) -> Room:
        return Room(self._limit_bytes, static_bytes(self) + self.executor.connections.device_bytes)

    def _go_on_by(self, state: Mapping[str, Any] | None) -> None:
        wanted = self._limit_bytes, self.num_stages
        if state is not None and (state["limit_bytes"], len(state["costs"]["parts"])) == wanted:
            self.loop.load_state_dict(state)
            _say("trains by the order that was saved")
        else:
            _say("the checkpoint has no order for this memory and these stages: searches anew")


def _say(line: str) -> None:
    print_once(f"{SEARCHED}: {line}")
