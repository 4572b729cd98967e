"""kfkb's group size, measured and chosen while a pipeline of plain torch trains (Ada-Grouper §4.3, §5.2)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.schedule import BACKWARD, Programs, find
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.tuner.grouped import Candidate, GroupedSchedule
from evenpipe.tuner.loop import AdaptiveLoop
from evenpipe.tuner.part_watch import PartWatch, measured_by
from evenpipe.tuner.process_memory import limit_bytes

__all__ = ["GroupTuning", "print_once"]

#: Micro-batches that are timed, after one that loads kernels and fills caches.
_TIMED: Final = 3


class GroupTuning:
    """Trains a pipeline whose schedule has groups of micro-batches: call its `step` in place of the pipeline's.

    The first batches train in groups of one, and are measured. From then on, between two batches, all ranks measure
    their links and the first one decides. Losses and gradients are the same under every size.

    optimizer: of this stage's parameters, whose state counts against memory_gib, what a process may hold; a GPU's
    memory if left out. interval: iterations between decisions; as many as take an hour if left out. state: what
    `state_dict` gave. All ranks of all replicas make it alike. Raises ValueError, and `step` PlanError, one line, where
    groups of one do not fit.
    """

    def __init__(
        self,
        pipeline: ModulePipeline,
        optimizer: torch.optim.Optimizer,
        *,
        memory_gib: float | None = None,
        interval: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        schedule, device = pipeline.program.schedule, pipeline.device
        spec = find(schedule.name)
        if "groups" not in spec.needs:
            raise ValueError(f"program: {spec.name} groups no micro-batches, so there is no size to choose: build kfkb")
        if pipeline.executor.swaps is not None:
            raise ValueError("swap: memory is measured without swaps: leave it out, or GroupTuning")
        if memory_gib is None and device.type != "cuda":
            raise ValueError("memory_gib: how much may a process hold? Give GiB: only of a GPU is it known")
        programs = Programs(spec, bool(pipeline.program.pairs), pipeline.executor.connections.queues)
        self._pipeline, self._optimizer = pipeline, optimizer
        self._schedule = GroupedSchedule(programs, schedule.stages)
        self._micro_batches = schedule.micro_batches
        self._watch = PartWatch(pipeline.executor.observer)
        pipeline.executor.observer = self._watch
        #: The number of the next batch, from 0.
        self.iteration = 0 if state is None else int(state["iteration"])
        self.loop = AdaptiveLoop(interval, print_once, lambda resumes: None, alone=False)
        self.loop.load_state_dict(None if state is None else state["loop"])
        # The samples that the loop counts are micro-batches here, which are not cut anew.
        self.loop.start(self._schedule, self._micro_batches, [1], limit_bytes(memory_gib, device))

    @property
    def group_size(self) -> int:
        """Return k of the last batch."""
        return self._pipeline.program.schedule.group_size

    def step(self, *batch: Any, **named: Any) -> Tensor | None:
        """Return what the pipeline's `step` returns, in groups of the size of the moment."""
        pipeline, executor = self._pipeline, self._pipeline.executor
        measures = self.loop.wanted is not None
        size = 1 if measures else self.loop.choose(executor, self.iteration, self._micro_batches).k
        pipeline.program = self._schedule.program(Candidate(size, 1, self._micro_batches))
        self._watch.timed, self._watch.store = measures, executor.store if measures else None
        with executor.measuring(measures):
            loss = pipeline.step(*batch, **named)
        self.iteration += 1
        if measures and len(self._watch.ms[BACKWARD, 0]) > _TIMED:
            kept = pipeline.kept_bytes(self._optimizer)
            static = kept.static_bytes + executor.connections.device_bytes
            self.loop.take(measured_by(self._watch, kept.message_bytes, static), executor, self.iteration)
            self._watch.clear()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on as this one would, as JSON has it."""
        return {"iteration": self.iteration, "loop": self.loop.state_dict()}


def print_once(line: str) -> None:
    """Print `line` once for all ranks."""
    if dist.get_rank() == 0:
        print(f"evenpipe: {line}", file=sys.stderr, flush=True)
