"""The trainer's engines "evenpipe" and "megatron": a megatron-core model in training, as Megatron-LM trains it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from evenpipe.megatron.adaptive.static_memory import static_bytes
from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron.train_engine.learner import Learner, Tensors, make_learner, micro_batches, train_step
from evenpipe.megatron.train_engine.schedules import InstalledSchedule, installed_schedule
from evenpipe.megatron.two_bw.expert_losses import forget_model
from evenpipe.megatron.vee import vee_patches
from evenpipe.runtime.memory import MemoryCounter
from evenpipe.train.engine import Case, Coordinates, FailureContext, OptimizerStep, Tuned, changed_versions
from evenpipe.train.options import OptionsError
from evenpipe.train.run import digest
from evenpipe.tuner.group_memory import PlanError
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
    with vee_patches().in_force() if "vee" in options.programs.spec.needs else nullcontext():
        yield from _opened(case)


def _opened(case: Case) -> Iterator[MegatronEngine]:
    options = case.options
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.stages,
        virtual_pipeline_model_parallel_size=options.plan.chunks if options.plan.chunks > 1 else None,
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
        learner, schedule = self.learner, self.schedule
        with torch.no_grad():
            for chunk, saved in zip(learner.replica.chunks, state["parameters"], strict=True):
                for name, parameter in chunk.named_parameters():
                    parameter.copy_(saved[name])
            for optimizer, saved in zip(_parts(learner.optimizer), state["optimizers"], strict=True):
                _restore_optimizer(optimizer, saved)
        learner.scheduler.load_state_dict(state["scheduler"])
        _restore_random(learner.device, state["random"])
        if schedule.adaptive is not None and state["adaptive"] is not None:
            schedule.adaptive.load_state_dict(state["adaptive"])
        extra = schedule.extra
        if extra is not None:
            extra.load_state_dict(state["extra"])
        keeps_older = extra is not None and not learner.options.in_place
        return changed_versions(state["extra"], keeps_older, learner.options.delay_correction)

    def begin(self, iteration: int) -> None:
        self._first = iteration
        self._streams = micro_batches(self.learner, iteration)
        if self.schedule.adaptive is not None:
            self.schedule.adaptive.iteration = iteration

    def train(self, iteration: int) -> list[float]:
        self.schedule.start_batch()
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
        learner, schedule, extra = self.learner, self.schedule, self.schedule.extra
        return {
            "parameters": [
                {name: _compact(parameter) for name, parameter in chunk.named_parameters()}
                for chunk in learner.replica.chunks
            ],
            "optimizers": [_optimizer_state(optimizer) for optimizer in _parts(learner.optimizer)],
            "scheduler": learner.scheduler.state_dict(),
            "random": _random_state(learner.device),
            "extra": None if extra is None else extra.state_dict() | extra.own_state(),
            "adaptive": None if schedule.adaptive is None else schedule.adaptive.state_dict(),
        }


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Yield the optimizers that a chained optimizer is made of, except those without parameters."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            yield part


def _masters(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Return what the optimizer steps: the parameters themselves in fp32, else copies or, if distributed, shares."""
    return [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return the state of one Megatron optimizer, this process' share if it is distributed.

    Megatron's own `state_dict` leaves the distributed optimizer's tensors to other functions, which gather them on one
    rank; here every process keeps its own. Settings such as the rate are not kept: they are as the run's options say.
    """
    inner = optimizer.optimizer.state_dict()
    scaler = getattr(optimizer, "grad_scaler", None)
    return {
        "masters": [_compact(master) for master in _masters(optimizer)],
        "state": {
            number: {name: _compact(value) if torch.is_tensor(value) else value for name, value in state.items()}
            for number, state in inner["state"].items()
        },
        # Where the fused optimizers count their steps.
        "steps": [group.get("step") for group in inner["param_groups"]],
        "grad_scaler": None if scaler is None else scaler.state_dict(),
    }


def _restore_optimizer(optimizer: MegatronOptimizer, saved: dict[str, Any]) -> None:
    groups = optimizer.optimizer.state_dict()["param_groups"]
    for group, step in zip(groups, saved["steps"], strict=True):
        if step is not None:
            group["step"] = step
    optimizer.optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    for master, value in zip(_masters(optimizer), saved["masters"], strict=True):
        master.copy_(value)
    if saved["grad_scaler"] is not None:
        optimizer.grad_scaler.load_state_dict(saved["grad_scaler"])


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory, and with no more of it than its own: a view would be saved with all that it is a view of."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _random_state(device: torch.device) -> dict[str, Any]:
    name, keys, *position = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def _restore_random(device: torch.device, saved: dict[str, Any]) -> None:
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    if saved["cuda"] is not None:
        torch.cuda.set_rng_state(saved["cuda"], device)
    get_cuda_rng_tracker().set_states(saved["megatron"])
    torch.set_rng_state(saved["torch"])
