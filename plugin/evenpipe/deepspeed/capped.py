"""Swaps and recomputed layers under a cap in DeepSpeed's engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from evenpipe.deepspeed.log import print_once
from evenpipe.deepspeed.measuring import MeasuringEngine
from evenpipe.deepspeed.section import NAME
from evenpipe.runtime.host_swaps import HostLimit
from evenpipe.runtime.recomputed_layers import recomputing_layers, stateless
from evenpipe.schedule import Program, ScheduleError, Size
from evenpipe.tuner.swapping import SwapLoop
from evenpipe.upstream.ending import end_job

__all__ = ["CappedEngine"]


class CappedEngine(MeasuringEngine):
    """The engine of a section whose `swap` is "auto": each stage swaps and recomputes what keeps it under `memory_gib`.

    As `SwapLoop` has it. A checkpoint has nothing of it: a resumed run's first batch is measured anew.
    """

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, with the swaps of the moment."""
        try:
            loss: Tensor = super().train_batch(data_iter)
            self._swap_loop.end(self.executor, self._size(self.micro_batches), self._room, self._programs)
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

    def _train(self, micro_batches: int) -> None:
        able, loop = self._able(), self._swap_loop
        loop.begin(self.executor, [able])
        [count] = loop.layers(self._programs, self._size(micro_batches))
        with recomputing_layers(able[:count]):
            super()._train(micro_batches)

    @property
    def _weighs(self) -> bool:
        return self._swap_loop.weighs

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

    def _state(self) -> None:
        return None
