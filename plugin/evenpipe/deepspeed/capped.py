"""Swaps and recomputed layers under a cap in DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.measuring import MeasuringEngine
from evenpipe.deepspeed.section import NAME
from evenpipe.runtime.host_swaps import HostLimit
from evenpipe.runtime.recomputed_layers import recomputing_layers, stateless
from evenpipe.schedule import Program, Programs, ScheduleError, Size
from evenpipe.tuner.swapping import SwapLoop
from evenpipe.upstream.ending import end_job

__all__ = ["CappedEngine"]


class CappedEngine(MeasuringEngine):
    """The engine of a section whose `swap` is "auto": each stage swaps and recomputes what keeps it under `memory_gib`.

    As `SwapLoop` has it; with `bpipe`, stages may send micro-batches to their partners too. A checkpoint has the plan,
    and the settings that it was made for.
    """

    _state_name: ClassVar[str] = "evenpipe_capped"
    loop: SwapLoop

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, with the swaps of the moment."""
        try:
            loss: Tensor = super().train_batch(data_iter)
            self.loop.end(self.executor, self._size(self.micro_batches), self._room, self._programs)
        except ScheduleError as error:
            given = self.evenpipe.memory_gib
            end_job(f"{NAME}.{'swap: auto' if given is None else f'memory_gib: {given:g}'}: {error}")
        return loss

    def _prepare(self) -> Any:
        self.loop = SwapLoop(_say)
        self._programs = Programs(self._programs.spec)  # which move nothing, also with `bpipe`: the loop says what does
        return super()._prepare()

    def _swap(self) -> HostLimit:
        return self.loop.limit

    def _program(self, size: Size) -> Program:
        return self.loop.program(self._programs, size)

    def _train(self, micro_batches: int) -> None:
        able, loop, size = self._able(), self.loop, self._size(micro_batches)
        loop.look(size)
        loop.begin(self.executor, [able])
        [count] = loop.layers(self._programs, size)
        with recomputing_layers(able[:count]):
            super()._train(micro_batches)

    @property
    def _weighs(self) -> bool:
        return self.loop.weighs

    def _size(self, micro_batches: int) -> Size:
        return Size(self.num_stages, micro_batches, group_size=self.group_size)

    def _able(self) -> list[nn.Module]:
        """Return the layers that can be recomputed, from the first on.

        None where DeepSpeed recomputes some already, backwards come in halves, or layers of model parallelism may draw
        random numbers from generators of their own.
        """
        recomputes, splits = self.module.activation_checkpoint_interval, "split" in self._programs.spec.needs
        if recomputes or splits or self.is_model_parallel:
            return []
        return stateless([layer for layer in self.module.forward_funcs if isinstance(layer, nn.Module)])

    def _state(self) -> dict[str, Any] | None:
        return self._with_settings(super()._state())

    def _go_on_by(self, state: Mapping[str, Any] | None) -> None:
        if state is not None and self._is_of_these_settings(state):
            self.loop.load_state_dict(state)
            _say("trains by the plan that was saved")
        else:
            self.loop.forget()
            _say("the checkpoint has no plan for these settings: measures again")

    @property
    def _settings(self) -> dict[str, Any]:
        ordered = {"schedule": self._programs.spec.name, "group_size": self.group_size, "partners": self.evenpipe.bpipe}
        return super()._settings | ordered


def _say(line: str) -> None:
    print_once(f"swap auto: {line}")
