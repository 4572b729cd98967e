"""Steps of torch's optimizers under 2bw: what stages tell each other is begun at its place in the order of all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.runtime.weight_versions import WeightVersions
from evenpipe.schedule import find
from evenpipe.torch.ties import Ties
from evenpipe.torch.two_bw import PlainGradients
from evenpipe.two_bw.stream import TwoBW


class Shared(Ties):
    """Shared gradients, of which each is the sum of two alike; `told` says what was asked for."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._given: list[Tensor] = []

    def fill(self) -> None:
        self.told.append("fill")

    def start(self, gradients: Mapping[int, Tensor]) -> None:
        self.told.append("start")
        self._given = [*gradients.values()]

    def finish(self) -> None:
        self.told.append("finish")
        for gradient in self._given:
            gradient.mul_(2)
        self._given = []

    def __bool__(self) -> bool:
        return True


def test_shared_gradients_are_sent_where_all_stages_gather_and_not_where_this_one_submits(
    alone: dist.ProcessGroup,
) -> None:
    """The last stage submits before the first has ended its batch, and would hold up what that needs of it."""
    weight, shared = torch.nn.Parameter(torch.ones(3)), Shared()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gradients = PlainGradients(WeightVersions([weight]), optimizer, lambda: _squares(weight), alone, ties=shared)
    two_bw = TwoBW(gradients, find("2bw"), bpipe=False)
    weight.grad = torch.full((3,), 0.25)
    two_bw.submit()
    assert shared.told == ["fill"]
    two_bw.gather()
    assert shared.told == ["fill", "start", "finish"]
    two_bw.update()
    assert shared.told == ["fill", "start", "finish"]
    assert weight.tolist() == [0.5] * 3
    assert two_bw.submit().grad_norm == pytest.approx(3**0.5 / 2)


def _squares(weight: torch.nn.Parameter) -> Tensor:
    return torch.zeros(1, dtype=torch.float64) if weight.grad is None else weight.grad.double().square().sum().view(1)
