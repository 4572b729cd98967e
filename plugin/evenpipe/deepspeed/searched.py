"""A schedule searched for the run's own times in DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.measuring import MeasuringEngine
from evenpipe.deepspeed.section import NAME
from evenpipe.schedule import SEARCHED, Program, ScheduleError, Size
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

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, under the order of the moment."""
        size = Size(self.num_stages, self.micro_batches)
        self.loop.begin(self.global_steps, size)
        try:
            self.loop.prepare(self.executor, size, self._programs.queues)
            loss: Tensor = super().train_batch(data_iter)
            self.loop.end(self.executor, self.global_steps, size, self._room)
        except ScheduleError as error:
            given = self.evenpipe.memory_gib
            where = f'{NAME}.schedule: "{SEARCHED}"' if given is None else f"{NAME}.memory_gib: {given:g}"
            end_job(f"{where}: {error}")
        return loss

    def _prepare(self) -> Any:
        self.loop = SearchLoop(self._watch, self.evenpipe.retune_interval, _say)
        return super()._prepare()

    def _program(self, size: Size) -> Program:
        return self.loop.program(size, self._programs.queues)

    def _room(self) -> Room:
        return Room(self._limit_bytes, self._static_bytes())

    def _go_on_by(self, state: Mapping[str, Any] | None) -> None:
        wanted = self._limit_bytes, self.num_stages
        if state is not None and (state["limit_bytes"], len(state["costs"]["parts"])) == wanted:
            self.loop.load_state_dict(state)
            _say("trains by the order that was saved")
        else:
            _say("the checkpoint has no order for this memory and these stages: searches anew")


def _say(line: str) -> None:
    print_once(f"{SEARCHED}: {line}")
