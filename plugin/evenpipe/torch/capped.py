"""Swaps and recomputed layers under a cap, measured and decided while a pipeline of plain torch trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.recomputed_layers import recomputing_layers, stateless
from evenpipe.schedule import ACCEPT, EVICT, LOAD, RETURN, Programs, Size, Spec, needs_of
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.torch.tuned import print_once
from evenpipe.tuner.process_memory import Room, limit_bytes
from evenpipe.tuner.swapping import SwapLoop

__all__ = ["SwapTuning"]

#: Of BPipe.
_MOVES: Final = (EVICT, LOAD, ACCEPT, RETURN)


class SwapTuning:
    """Has each stage of a pipeline keep to a cap, by swaps and recomputation: call `step` in place of the pipeline's.

    As `SwapLoop` has it: the first batch is measured. Where the pipeline's program is built with `bpipe`, stages may
    send micro-batches to their partners too. Losses and gradients stay the same. What can be recomputed are
    the modules of a `nn.Sequential`, and any other part of the model as a whole; none from one on
    that changes its buffers, such as running statistics.

    optimizer: of this stage's parameters, whose state counts against memory_gib, what a process may hold; a GPU's
    memory if left out. state: what `state_dict` gave in a run of the same model and batches; that of another cap,
    schedule or size is left, with a line. Rank 0's counts for all. All ranks of all replicas make it alike and
    together, before the first batch. Raises ValueError, and `step` ScheduleError, one line, where nothing keeps a stage
    under the cap.
    """

    def __init__(
        self,
        pipeline: ModulePipeline,
        optimizer: torch.optim.Optimizer,
        *,
        memory_gib: float | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        schedule = pipeline.program.schedule
        needs = needs_of(schedule)
        for cannot, why in (
            ("stream" in needs, f"program: {schedule.name} does not flush between batches"),
            (pipeline.executor.swaps is not None, "swap: a share is swapped already"),
        ):
            if cannot:
                raise ValueError(f"{why}: leave that out, or SwapTuning")
        if memory_gib is None and pipeline.device.type != "cuda":
            raise ValueError("memory_gib: how much may a process hold? Give GiB: only of a GPU is it known")
        self.loop = SwapLoop(print_once)
        self._pipeline, self._optimizer = pipeline, optimizer
        self._limit_bytes = limit_bytes(memory_gib, pipeline.device)
        self._size = Size(schedule.stages, schedule.micro_batches, schedule.chunks, schedule.group_size)
        self._able = [_layers_of(chunk) for chunk in pipeline.chunks]
        rows = tuple(tuple(action for action in row if action.kind not in _MOVES) for row in schedule.actions)
        plain = replace(schedule, actions=rows, bounds=())
        plain = replace(plain, bound=max(plain.peak_live))
        self._plain = Programs(Spec.of(plain, needs), queues=pipeline.executor.connections.queues)
        pipeline.executor.swap(self.loop.limit)
        #: What a plan is of no use without.
        self._settings = {
            "schedule": schedule.name,
            "size": list(self._size),
            "partners": bool(pipeline.program.pairs),
            "limit_bytes": self._limit_bytes,
        }
        given = [state]
        dist.broadcast_object_list(given, src=0)  # ranks that go by different plans would wait for each other
        [state] = given
        if state is not None and self._settings.items() <= state.items():
            self.loop.load_state_dict(state)
            print_once("swap auto: trains by the plan that was saved")
        elif state is not None:
            print_once("swap auto: what was saved is of another cap, schedule or size: measures again")

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a run needs to train by the same plan, as JSON has it; None before there is one."""
        state = self.loop.state_dict()
        return None if state is None else state | self._settings

    def step(self, *batch: Any, **named: Any) -> Tensor | None:
        """Return what the pipeline's `step` returns."""
        pipeline, executor = self._pipeline, self._pipeline.executor
        pipeline.program = self.loop.program(self._plain, self._size)
        self.loop.begin(executor, self._able)
        counts = self.loop.layers(self._plain, self._size)
        again = [layer for able, count in zip(self._able, counts, strict=True) for layer in able[:count]]
        with executor.measuring(self.loop.weighs), recomputing_layers(again):
            loss = pipeline.step(*batch, **named)
        self.loop.end(executor, self._size, self._room, self._plain)
        return loss

    def _room(self) -> Room:
        static_bytes = self._pipeline.kept_bytes(self._optimizer).static_bytes
        return Room(self._limit_bytes, static_bytes + self._pipeline.executor.connections.device_bytes)


def _layers_of(chunk: nn.Module) -> list[nn.Module]:
    return stateless(list(chunk) if isinstance(chunk, nn.Sequential) else [chunk])
