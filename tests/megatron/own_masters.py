"""Megatron's optimizers that keep fp32 masters in their own state, on the CPU: Transformer Engine's FusedAdam, and the
one that steps on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.adamw import adamw

__all__ = ["KINDS", "WithOwnMasters"]


class FusedAdam(torch.optim.AdamW):
    """AdamW as in transformer_engine/pytorch/optimizers/fused_adam.py, with its arguments, by torch's own kernel.

    Gradients are in `decoupled_grad`. With `store_param_remainders`, a master is the parameter and what its rounding
    left out, which is kept beside it: neither is right with another version of the other.
    """

    def __init__(
        self,
        params: Any,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **given: Any,
    ) -> None:
        assert adam_w_mode
        assert use_decoupled_grad, "Megatron has it so without FP8"
        super().__init__(params, **given)
        self.master_weights, self._remainders = master_weights, store_param_remainders
        self._moments = exp_avg_dtype, exp_avg_sq_dtype

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's, which gives states the type of their parameter; here, as there, they keep their own."""
        super().load_state_dict(state_dict)
        every = (one for group in self.param_groups for one in group["params"])
        for number, one in enumerate(every):
            if number in state_dict["state"]:
                self.state[one] = {name: value.clone() for name, value in state_dict["state"][number].items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if getattr(one, "decoupled_grad", None) is not None:
                    self._step(group, one, one.decoupled_grad.float())

    def _step(self, group: dict[str, Any], one: Tensor, gradient: Tensor) -> None:
        state = self.state[one]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(one, dtype=self._moments[0])
            state["exp_avg_sq"] = torch.zeros_like(one, dtype=self._moments[1])
            state["master_param"] = torch.zeros_like(one, dtype=torch.float32) if self._remainders else one.float()
        master = one.float() + state["master_param"] if self._remainders else state["master_param"]
        moments = state["exp_avg"].float(), state["exp_avg_sq"].float()
        adamw(
            [master],
            [gradient],
            [moments[0]],
            [moments[1]],
            [],
            [state["step"]],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        one.copy_(master)
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            state[name].copy_(moment)
        state["master_param"].copy_(master - one.float() if self._remainders else master)


def _on_the_host(self: Any, offload_fraction: float) -> tuple[Any, ...]:
    """In place of `HybridDeviceOptimizer._get_sub_optimizer_param_groups`, for which nothing here is on a GPU."""
    assert offload_fraction == 1.0
    masters = {one: one.detach().clone().float() for group in self.param_groups for one in group["params"]}
    for group in self.param_groups:
        group["fused"] = False  # whose kernel rounds otherwise
    groups = [{**group, "params": [masters[one] for one in group["params"]]} for group in self.param_groups]
    of_masters = {master: one for one, master in masters.items()}
    return [group for group in groups if group["params"]], [], masters, of_masters, masters


#: What Megatron's configuration of the optimizer has, by the kind.
KINDS: dict[str, dict[str, Any]] = {
    "remainders": {"store_param_remainders": True},
    "masters": {"store_param_remainders": False},
    "moments in bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "on the host": {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
        "pin_cpu_grads": False,
        "pin_cpu_params": False,
    },
}


class WithOwnMasters:
    """Stands for `evenpipe.train.process.train_cases` in each process of a run: its optimizers are of this kind."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, cases: Any, *rest: Any) -> Any:
        from evenpipe.megatron.train_engine import learner
        from evenpipe.train.process import train_cases

        with _installed():
            given = {"use_precision_aware_optimizer": True, **KINDS[self._kind]}
            with mock.patch.object(learner, "OptimizerConfig", partial(learner.OptimizerConfig, **given)):
                return train_cases(cases, *rest)


@contextmanager
def _installed() -> Iterator[None]:
    """Inside, Megatron finds this FusedAdam, and uses it."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    engine = {f"transformer_engine{name}": ModuleType(name) for name in ("", ".pytorch", ".pytorch.optimizers")}
    engine["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    new: Callable[..., bool] = lambda *_, **__: True  # noqa: E731 (any release)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(sys.modules, engine))
        for module in (optimizers, optimizer_config):
            patches.enter_context(mock.patch.object(module, "is_te_min_version", new))
        patches.enter_context(mock.patch.object(optimizers, "Adam", FusedAdam))
        patches.enter_context(mock.patch.object(optimizers, "USING_PYTORCH_OPTIMIZER", False))
        patches.enter_context(mock.patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", _on_the_host))
        yield
