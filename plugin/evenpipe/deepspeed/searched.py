"""A schedule searched, or chosen, for the run's own times in DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.measuring import MeasuringEngine
from evenpipe.deepspeed.section import NAME
from evenpipe.deepspeed.unsupported import moved_anyway
from evenpipe.schedule import Program, ScheduleError, Size
from evenpipe.tuner.choosing import ChoiceLoop
from evenpipe.tuner.searching import SearchLoop
from evenpipe.upstream.ending import end_job

__all__ = ["ChoosingEngine", "SearchedEngine"]


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
            where = f'{NAME}.schedule: "{self.evenpipe.schedule}"' if given is None else f"{NAME}.memory_gib: {given:g}"
            end_job(f"{where}: {error}")
        return loss

    def _prepare(self) -> Any:
        self.loop = self._loop()
        self.loop.join(self._joins_partners(), self.evenpipe.swap is not None)
        return super()._prepare()

    def _loop(self) -> SearchLoop:
        return SearchLoop(self._watch, self.evenpipe.retune_interval, self._say)

    def _say(self, line: str) -> None:
        print_once(f"{self.evenpipe.schedule}: {line}")

    def _swap(self) -> None:
        """Nothing: the loop has the executor swap where an order that it has found does."""

    def _joins_partners(self) -> bool:
        return not self.module.dynamic_shape and not any(moved_anyway(self))

    def _program(self, size: Size) -> Program:
        return self.loop.program(size, self._programs.queues)

    def _go_on_by(self, state: Mapping[str, Any] | None) -> None:
        wanted = self._limit_bytes, self.num_stages
        if state is not None and (state["limit_bytes"], len(state["costs"]["parts"])) == wanted:
            self.loop.load_state_dict(state)
            self._say("trains by the order that was saved")
        else:
            self._say("the checkpoint has no order for this memory and these stages: searches anew")


class ChoosingEngine(SearchedEngine):
    """The engine of a section whose schedule is "auto".

    Two batches train one micro-batch at a time and are looked at; the others follow the fastest schedule that fits, as
    `evenpipe.tuner.choosing.ChoiceLoop` has it. A checkpoint has the choice, and the settings that it was made for.
    """

    _state_name: ClassVar[str] = "evenpipe_auto"
    loop: ChoiceLoop

    def _loop(self) -> ChoiceLoop:
        loop = ChoiceLoop(self._watch, self._say)
        recomputes = self.module.activation_checkpoint_interval
        more = "" if recomputes else "PipelineModule(activation_checkpoint_interval=1), "
        remedy = f", or use {more}a smaller train_micro_batch_size_per_gpu or more stages"
        loop.allow(remedy)
        return loop

    def _state(self) -> dict[str, Any] | None:
        return self._with_settings(super()._state())

    def _go_on_by(self, state: Mapping[str, Any] | None) -> None:
        if state is not None and self._is_of_these_settings(state):
            self.loop.load_state_dict(state)
            self._say("trains by the schedule that was chosen")
        else:
            self._say("the checkpoint has no choice for these settings: chooses again")
