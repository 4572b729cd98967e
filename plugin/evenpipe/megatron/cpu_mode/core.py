"""The patches under which megatron-core itself trains on CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from evenpipe.megatron.cpu_mode.patching import no_gpu, patch
from evenpipe.megatron.cpu_mode.torch_cuda import device_patches, random_patches, stream_patches
from evenpipe.upstream import Patch, PatchSet

__all__ = ["cpu_mode"]


def cpu_mode(device: str = "cpu") -> PatchSet:
    """The patches that make megatron-core train on CPU; nothing changes before `apply()` is called on them.

    With `device` "meta" models have shapes but neither memory nor values: to find out what they would take.

    Apply them before the first model is built. Refused where CUDA is available: with them in place, tensors stay on the
    CPU and the "CUDA" random state is the CPU's.
    """
    patches = [
        *device_patches(device),
        *random_patches(),
        *stream_patches(),
        *_send_patches(),
        *_norm_patches(),
        *_checkpoint_patches(),
    ]
    return PatchSet("cpu-mode", patches, guard=no_gpu)


def _send_patches() -> list[Patch]:
    """What is sent stays in memory until it has been."""
    return [
        patch(
            "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            _sending_aliases,
            "megatron-core frees a stage's output while gloo still sends it; an alias keeps the memory until then",
            "(*, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, "
            "prev_pipeline_rank, next_pipeline_rank)",
        )
    ]


def _sending_aliases(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_p2p_ops` on detached aliases of what it sends.

    `deallocate_output_tensor` swaps the `.data` of the sent tensor; gloo keeps the tensor but reads through it late.
    """

    def p2p_ops(**kwargs: Any) -> Any:
        for name in ("tensor_send_prev", "tensor_send_next"):
            if kwargs[name] is not None:
                kwargs[name] = kwargs[name].detach()
        return original(**kwargs)

    return p2p_ops


def _norm_patches() -> list[Patch]:
    """torch's layer norm takes part in sequence parallelism."""
    return [
        patch(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            _marked_for_sequence_parallel,
            "megatron-core has sequence parallelism only with the layer norms of Apex and Transformer Engine",
            "(cls, config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
            "normalization='LayerNorm')",
        )
    ]


def _marked_for_sequence_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """The parameters carry the mark by which megatron-core sums their gradients over tensor-parallel ranks."""

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = original(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new


def _checkpoint_patches() -> list[Patch]:
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
