"""Swaps under a cap in DeepSpeed's engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.measuring import MeasuringEngine
from evenpipe.deepspeed.section import NAME
from evenpipe.runtime.host_swaps import HostLimit
from evenpipe.schedule import Program, ScheduleError, Size
from evenpipe.tuner.swapping import SwapLoop
from evenpipe.upstream.ending import end_job

__all__ = ["CappedEngine"]


class CappedEngine(MeasuringEngine):
    """The engine of a section whose `swap` is "auto": each stage swaps as little as keeps it under `memory_gib`.

    As `SwapLoop` has it. A checkpoint has nothing of it: a resumed run's first batch is measured anew.
    """

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, with the swaps of the moment."""
        try:
            loss: Tensor = super().train_batch(data_iter)
            size = Size(self.num_stages, self.micro_batches, group_size=self.group_size)
            self._swap_loop.end(self.executor, size, self._room, self._programs)
        except ScheduleError as error:
            given = self.evenpipe.memory_gib
            end_job(f"{NAME}.{'swap: auto' if given is None else f'memory_gib: {given:g}'}: {error}")
        return loss

    def _prepare(self) -> Any:
        self._swap_loop = SwapLoop(lambda line: print_once(f"swap auto: {line}"))
        return super()._prepare()

    def _swap(self) -> HostLimit:
        return self._swap_loop.limit

    def _program(self, size: Size) -> Program:
        return self._swap_loop.programs(self._programs, size)(size)

    @property
    def _weighs(self) -> bool:
        return self._swap_loop.weighs

    def _state(self) -> None:
        return None
