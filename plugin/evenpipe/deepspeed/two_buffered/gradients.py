"""What a step needs of a batch's gradients, which are kept from its last backward until then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Gradients", "sum_of_squares"]


class Gradients(ABC):
    """The gradients of one stage, for one kind of optimizer.

    `counted`: the step needs the norm over all stages, of which `squares` is this one's part. `skips`: a step whose
    norm is no number is skipped. `sharded`: each replica keeps a part of them. `weights` are tensors beside the
    parameters that the optimizer reads or writes the weights through.
    """

    counted = False
    skips = True
    sharded = False
    weights: tuple[Tensor, ...] = ()

    @abstractmethod
    def keep(self) -> None:
        """Take the batch's gradients, which have been reduced between replicas, out of the next one's way."""

    @abstractmethod
    def kept(self, weight: Tensor) -> Tensor | None:
        """What is kept for `weight`; None where it has no gradient.

        To be changed in place, or, if sharded, a copy with zeros for what other replicas keep, for `put_back`.
        """

    def put_back(self, weight: Tensor, gradient: Tensor) -> None:
        """What `kept` gave for `weight` has been changed."""
        assert not self.sharded, "a copy has to be put back"

    def held_bytes(self, waits: bool) -> int:
        """What keeping takes; `waits`: until the next batch's gradients are added up."""
        return 0

    @abstractmethod
    def squares(self) -> Tensor:
        """The sum of squares of what is kept, without what another stage counts; no number if one of them is none.

        A double of no dimension on the device, so that the host need not wait for the batch's last backward.
        """

    @abstractmethod
    def step(self, step: Callable[[], Any], norm: float) -> None:
        """Let `step` see what was kept, and `norm` for the norm over all stages; it is gone then."""

    def scaled(self, loss: Tensor) -> Tensor:
        """A loss whose backward pass makes these gradients; as it is where DeepSpeed scales it, or nothing has to."""
        return loss


def sum_of_squares(gradients: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Of all gradients, given with their weights, but of tied weights that another stage counts; a double."""
    counted = [
        gradient
        for weight, gradient in gradients
        if gradient is not None and not getattr(weight, "ds_pipe_replicated", False)
    ]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in counted]
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
