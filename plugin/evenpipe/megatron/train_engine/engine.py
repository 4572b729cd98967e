"""The trainer's engines "evenpipe" and "megatron": a megatron-core model in training, as Megatron-LM trains it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from evenpipe.megatron.adaptive.static_memory import static_bytes
from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron.train_engine.schedules import InstalledSchedule, installed_schedule
from evenpipe.megatron.train_engine.state import capture, restore
from evenpipe.megatron.train_engine.step import Learner, Tensors, make_learner, micro_batches, train_step
from evenpipe.megatron.two_bw.expert_losses import forget_model
from evenpipe.planner.memory import PlanError
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.train.engine import Case, Coordinates, OptimizerStep, Tuned
from evenpipe.train.gather import digest
from evenpipe.train.options import OptionsError
from evenpipe.train.recorder import FailureContext
from evenpipe.tuner.process_memory import KeptBytes

__all__ = ["MegatronEngine", "opened", "prepare"]


def prepare(device: torch.device) -> None:
    """Megatron-core computes without a GPU from here on, where `device` is none."""
    if device.type == "cpu":
        cpu_mode().apply()


@contextmanager
def opened(case: Case) -> Iterator[MegatronEngine]:
    """The engine of one run; Megatron's parallel state is there inside."""
    options = case.options
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.stages,
        virtual_pipeline_model_parallel_size=options.chunks if options.chunks > 1 else None,
        expert_model_parallel_size=options.expert_parallel,
        distributed_timeout_minutes=options.timeout_minutes,
    )
    try:
        learner = make_learner(options, case.corpus, case.device)
        with installed_schedule(learner, case.failure.stage, case.recorder, case.note) as schedule:
            yield MegatronEngine(learner, schedule, case.failure)
    finally:
        parallel_state.destroy_model_parallel()
        forget_model()


class MegatronEngine:
    """`learner` in training under `schedule`; fulfils `evenpipe.train.engine.Engine`."""

    def __init__(self, learner: Learner, schedule: InstalledSchedule, failure: FailureContext) -> None:
        self.learner = learner
        self.schedule = schedule
        self._failure = failure
        self._first = 0
        self._streams: list[Iterator[Tensors]] = []
        self._stepped: OptimizerStep | None = None
        self.coordinates = Coordinates(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
        self.replicas: dist.ProcessGroup = parallel_state.get_data_parallel_group()

    @property
    def counter(self) -> MemoryCounter:
        return self.schedule.counter

    def restore(self, state: dict[str, Any]) -> str | None:
        return restore(self.learner, self.schedule, state)

    def begin(self, iteration: int) -> None:
        self._first = iteration
        self._streams = micro_batches(self.learner, iteration)
        if self.schedule.adaptive is not None:
            self.schedule.adaptive.iteration = iteration

    def start_batch(self) -> None:
        self.schedule.start_batch()

    def train(self, iteration: int) -> list[float]:
        try:
            stepped = train_step(self.learner, self._streams, self._failure)
        except PlanError as error:
            limit = self.learner.options.memory_gib
            raise OptionsError(f"--memory-gib{'' if limit is None else f' {limit:g}'}: {error}") from None
        self._stepped = OptimizerStep(iteration, stepped.updated, stepped.grad_norm)
        return [total / count for total, count in (report["lm loss"].tolist() for report in stepped.reduced)]

    @property
    def finished(self) -> OptimizerStep | None:
        if self.schedule.extra is None:
            return self._stepped
        if self.schedule.extra.finished is None:
            return None
        batch, late = self.schedule.extra.finished
        return OptimizerStep(self._first + batch, late.updated, late.grad_norm)

    def drain(self) -> None:
        if self.schedule.extra is not None:
            self.schedule.extra.drain()

    @property
    def versions_peak(self) -> int:
        return 1 if self.schedule.extra is None else self.schedule.extra.versions.peak

    @property
    def tuned(self) -> Tuned:
        adaptive = self.schedule.adaptive
        if adaptive is None or (tuner := adaptive.loop.tuner) is None:
            return Tuned()
        return Tuned(tuple(tuner.retunes), adaptive.loop.predicted_saved_bytes)

    def kept_bytes(self) -> KeptBytes:
        chunks, extra = self.learner.replica.chunks, self.schedule.extra
        trainable = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
        return KeptBytes(
            sum(parameter.nbytes for parameter in trainable),
            0 if extra is None else extra.versions.nbytes,
            0 if extra is None else extra.gradients.held_bytes,
            static_bytes(chunks, self.learner.optimizer),
        )

    def weights(self) -> dict[tuple[int, int], str]:
        chunks, (stage, shard, _) = self.learner.replica.chunks, self.coordinates
        if self.learner.options.expert_parallel == 1:
            return {(stage, shard): digest(chunks)}
        # Experts that are shared out have replicas of their own, and no tensor-parallel ranks beside them.
        experts = 1 + parallel_state.get_expert_model_parallel_rank()
        return {
            (stage, shard): digest(chunks, lambda parameter: getattr(parameter, "allreduce", True)),
            (stage, experts): digest(chunks, lambda parameter: not getattr(parameter, "allreduce", True)),
        }

    def state(self) -> dict[str, Any]:
        return capture(self.learner, self.schedule)
