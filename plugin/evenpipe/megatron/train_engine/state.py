"""What one process needs to go on from an iteration: captured as plain tensors and numbers, and restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from evenpipe.megatron.train_engine.schedules import InstalledSchedule
from evenpipe.megatron.train_engine.step import Learner

__all__ = ["capture", "restore"]


def capture(learner: Learner, schedule: InstalledSchedule) -> dict[str, Any]:
    """All that a process has which the options do not give; nothing is under way.

    What is captured may share the memory of what is being trained.
    """
    return {
        "parameters": [
            {name: _compact(parameter) for name, parameter in chunk.named_parameters()}
            for chunk in learner.replica.chunks
        ],
        "optimizers": [_optimizer_state(optimizer) for optimizer in _parts(learner.optimizer)],
        "scheduler": learner.scheduler.state_dict(),
        "random": _random_state(learner.device),
        "extra": None if schedule.extra is None else schedule.extra.state_dict(),
        "adaptive": None if schedule.adaptive is None else schedule.adaptive.state_dict(),
    }


def restore(learner: Learner, schedule: InstalledSchedule, state: dict[str, Any]) -> str | None:
    """Take over what `capture` gave on the same rank of a run with the same layout.

    Returns what to tell the user where the run does not keep what the checkpoint has, or the other way round: it then
    goes on from the newest weights.
    """
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
    if (extra is None) == (state["extra"] is None):
        return None
    if extra is None:
        return "the checkpoint has two versions of the weights: this run goes on from the newer one"
    return "the checkpoint has one version of the weights: both versions of this run start from it"


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Those that a chained optimizer is made of, but for those without parameters."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            yield part


def _masters(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """What the optimizer steps: in fp32 the parameters themselves, else copies or, if distributed, shares of them."""
    return [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """The state of one Megatron optimizer, this process' share if it is distributed.

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
