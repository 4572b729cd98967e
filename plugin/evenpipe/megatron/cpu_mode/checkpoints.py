"""Checkpoints of the distributed optimizer when its Adam is torch's, for want of Apex and Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evenpipe.megatron.cpu_mode.patching import patch
from evenpipe.upstream import Patch

__all__ = ["checkpoint_patches"]


def checkpoint_patches() -> list[Patch]:
    """What is needed for the distributed optimizer to load what it has saved."""
    optimizer = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
    return [
        patch(
            f"{optimizer}.state_dict",
            _with_state,
            "the distributed optimizer, about to load, wants the step count that torch's Adam has only after a step",
            "(self)",
        ),
        patch(
            f"{optimizer}._get_main_param_and_optimizer_states",
            _without_step,
            "the distributed optimizer takes the step count of torch's Adam for a tensor as long as the parameter",
            "(self, model_param)",
        ),
        patch(
            f"{optimizer}._set_main_param_and_optimizer_states",
            _keeping_step,
            "the distributed optimizer looks for the step count of torch's Adam among the saved tensors, where it is "
            "not, and writes to parameters with gradients on",
            "(self, model_param, tensors)",
        ),
    ]


def _with_state(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`state_dict`, of a torch optimizer that has made no step as its first step would have set it up."""

    def state_dict(self: Any) -> Any:
        import torch

        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return original(self)

    return state_dict


def _without_step(original: Callable[[Any, Any], dict[str, Any]]) -> Callable[[Any, Any], dict[str, Any]]:
    """The tensors that are saved; upstream keeps the step count apart, with the parameter groups."""

    def get_main_param_and_optimizer_states(self: Any, model_param: Any) -> dict[str, Any]:
        return {name: tensor for name, tensor in original(self, model_param).items() if name != "step"}

    return get_main_param_and_optimizer_states


def _keeping_step(original: Callable[..., None]) -> Callable[..., None]:
    """As upstream has it, but the step count, which it has set already, gets a tensor for each parameter.

    Upstream sets one tensor for all, and torch's Adam, which counts in place, would count it up once per parameter.
    """

    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        import torch

        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        with torch.no_grad():
            original(self, model_param, {**tensors, "step": state["step"]})

    return set_main_param_and_optimizer_states
