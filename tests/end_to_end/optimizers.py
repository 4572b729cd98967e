"""Optimizers of several kinds in the place of Megatron's AdamW, for `evenpipe train` and for the oracle alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["LAYER_WISE", "OPTIMIZERS", "RATES", "Optimizers", "in_place_of_adamw"]


class Lion(torch.optim.Optimizer):
    """The sign of a momentum (Chen et al., *Symbolic Discovery of Optimization Algorithms*, 2023); counts its steps."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99), "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                one, other = group["betas"]
                rate = group["lr"] / (1 if group["step"] < 10 else 2)
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(momentum.lerp(parameter.grad, 1 - one).sign_(), alpha=-rate)
                momentum.lerp_(parameter.grad, 1 - other)


class Lars(torch.optim.Optimizer):
    """A step as long as a part of each parameter (You et al., *Large Batch Training of Convolutional Networks*)."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update: Tensor = parameter.grad + group["weight_decay"] * parameter
                trust = parameter.norm() / update.norm().clamp(min=1e-12)
                parameter.add_(update * trust.clamp(1e-3, 10), alpha=-group["lr"])


class Muon(torch.optim.Optimizer):
    """Torch's Muon for whatever is a matrix, and its NAdam for the rest."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})
        self._kinds: list[tuple[bool, torch.optim.Optimizer]] = [
            (True, torch.optim.Muon([torch.nn.Parameter(torch.zeros(1, 1))], lr=lr)),
            (False, torch.optim.NAdam([torch.nn.Parameter(torch.zeros(1))], lr=lr)),
        ]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for of_matrices, optimizer in self._kinds:
            optimizer.state = self.state
            optimizer.param_groups = [
                {
                    **optimizer.defaults,
                    **group,
                    "params": [one for one in group["params"] if (one.dim() == 2) == of_matrices],
                }
                for group in self.param_groups
            ]
            optimizer.step()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.AdamW,
    "Lion": Lion,
    "LARS": Lars,
    "Muon": Muon,
    "Muon, layer-wise": Muon,
    "RMSprop": lambda params, lr, **_: torch.optim.RMSprop(params, lr=lr),
    "Adafactor": lambda params, lr, **_: torch.optim.Adafactor(params, lr=lr),
}
#: The learning rate tells which one is wanted, so that one set of processes trains with all of them.
RATES = {"Adam": 0.01, "Lion": 0.001, "LARS": 0.011, "Muon": 0.012, "RMSprop": 0.0014, "Adafactor": 0.015}
RATES["Muon, layer-wise"] = 0.013
LAYER_WISE = "Muon, layer-wise"


@contextmanager
def in_place_of_adamw() -> Iterator[None]:
    """Inside, `torch.optim.AdamW` makes the optimizer of its rate."""
    named = {rate: OPTIMIZERS[name] for name, rate in RATES.items()}
    with mock.patch("torch.optim.AdamW", lambda params, lr, **settings: named[lr](params, lr=lr, **settings)):
        yield


class Optimizers:
    """Stands for `evenpipe.train.process.train_cases` in each process of a run."""

    def __call__(self, cases: Any, *rest: Any) -> Any:
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
        from megatron.core.process_groups_config import ProcessGroupCollection

        from evenpipe.megatron.train_engine import learner
        from evenpipe.train.process import train_cases

        class LayerWise(LayerWiseDistributedOptimizer):  # type: ignore[misc]
            def allgather_params(self) -> None:
                self.broadcast_params()  # Megatron's reference: gloo gathers equal sizes only

        make = learner.get_megatron_optimizer

        def made(config: Any, chunks: Any) -> Any:
            optimizer = make(config, chunks)
            if config.lr != RATES[LAYER_WISE]:
                return optimizer
            groups = ProcessGroupCollection.use_mpu_process_groups()
            return LayerWise(optimizer.chained_optimizers, config, groups)

        with in_place_of_adamw(), mock.patch.object(learner, "get_megatron_optimizer", made):
            return train_cases(cases, *rest)
