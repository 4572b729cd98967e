"""W(t+1) = W(t) − step(∇f(W(t−d))): PipeDream-2BW's update rule (§3.1) for d = 1, and for any other delay; clipping."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Biases", "TwoBWUpdates", "clip", "descend", "global_norm"]


class TwoBWUpdates:
    """The newest weights, which are the parameters of `optimizer`, and the older versions that `delay` asks for.

    The optimizer's state advances once a batch, with gradients taken at the old weights; its step is applied to the
    newest. So m(t) = β·m(t−1) + (1−β)·∇f(W(t−1)), as §3.1 has it, and likewise for Adam's second moment.

    `ahead` γ: gradients are taken at V(t−d), where V(t+1) = W(t+1) + γ·(W(t+1) − W(t)) and V(0) = W(0).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, delay: int, ahead: float = 0.0) -> None:
        self._optimizer = optimizer
        self._ahead = ahead
        self._newest = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # W(max(t−d, 0)), …, W(t) for the batch t to come: the first d + 1 batches all run on W(0).
        self._versions = [self._copy() for _ in range(delay + 1)]
        self._weights = self._before = self._copy()

    @property
    def seen(self) -> list[Tensor]:
        """V(max(t−d, 0)), on which batch t, the next one, runs; in the order of the optimizer's parameters."""
        return self._versions[0]

    @property
    def newest(self) -> list[Tensor]:
        """W(t), before batch t, the next one, has changed anything."""
        return self._weights

    @property
    def before(self) -> list[Tensor]:
        """W(max(t−1, 0))."""
        return self._before

    @property
    def foremost(self) -> list[Tensor]:
        """V(t)."""
        return self._versions[-1]

    def update(self, gradients: Sequence[Tensor], learning_rate: float) -> None:
        """Make W(t+1) of W(t) with batch t's gradients, which were taken at `seen`, and its learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for parameter, gradient in zip(self._newest, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        before, self._weights = self._weights, self._copy()
        self._before = before
        ahead = [torch.add(new, new - old, alpha=self._ahead) for new, old in zip(self._weights, before, strict=True)]
        self._versions = [*self._versions[1:], ahead if self._ahead else self._weights]

    def skip(self) -> None:
        """Make W(t+1) = W(t): batch t's gradients are no numbers."""
        self._versions = [*self._versions[1:], self._versions[-1]]

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._newest]


class Biases:
    """The experts' bias of a router: B(t+1) = B(t) + rate · sign(mean - counts of batch t), routed by B(t-d)."""

    def __init__(self, router: Any, delay: int) -> None:
        self._router = router
        self._versions = [torch.zeros_like(router.expert_bias) for _ in range(delay + 1)]

    def start_batch(self) -> None:
        """Route by the version of the batch."""
        self.use(0)
        self._router.local_tokens_per_expert.zero_()

    def use(self, version: int) -> None:
        """Route by one of the versions B(t-d), ..., B(t) of the batch t, counted from 0, or from -1 downwards."""
        self._router.expert_bias.copy_(self._versions[version])

    def end_batch(self) -> None:
        """Move the newest by what has been counted."""
        counts = self._router.local_tokens_per_expert
        moved = torch.sign(counts.mean() - counts) * self._router.config.moe_router_bias_update_rate
        self._versions = [*self._versions[1:], self._versions[-1] + moved]


def descend(
    updates: TwoBWUpdates,
    gradients: Callable[[int, list[Tensor]], Sequence[Tensor] | None],
    learning_rates: Sequence[float],
) -> list[Tensor]:
    """One update for each of `learning_rates`, batch t with `gradients(t, weights it runs on)`; the last weights.

    A batch without gradients is skipped.
    """
    for batch, learning_rate in enumerate(learning_rates):
        found = gradients(batch, updates.seen)
        if found is None:
            updates.skip()
        else:
            updates.update(found, learning_rate)
    return updates.newest


def global_norm(stages: Sequence[Sequence[Tensor]], added_in: torch.dtype = torch.float64) -> float:
    """The norm over all stages' gradients: fp32 within a stage, as Megatron takes it on CPU.

    The stages' squares are added one by one in `added_in`.
    """
    norms = [torch.norm(torch.stack([torch.norm(gradient) for gradient in stage])) for stage in stages]
    total = torch.zeros((), dtype=added_in)
    for norm in norms:
        total += norm.to(added_in).square()
    return math.sqrt(total.item())


def clip(gradients: Sequence[Tensor], norm: float, most: float) -> None:
    """Scale `gradients`, whose norm is `norm`, down to the norm `most`."""
    coefficient = most / (norm + 1.0e-6)
    if coefficient < 1.0:
        for gradient in gradients:
            gradient.mul_(coefficient)
