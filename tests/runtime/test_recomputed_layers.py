"""Layers that are computed again: the same gradients, and the layers as they were afterwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evenpipe.runtime.recomputed_layers import recomputing_layers, stateless


class Counted(nn.Tanh):
    """Tanh that counts its forwards."""

    forwards = 0

    def forward(self, given: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(given)


def gradients(model: nn.Sequential, recomputed: int) -> list[Tensor]:
    """Return the gradients of a batch whose first layers are computed again."""
    torch.manual_seed(0)
    given = torch.randn(2, 4, requires_grad=True)
    model.zero_grad()
    with recomputing_layers(list(model)[:recomputed]):
        loss = model(given).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_module_that_a_sequential_has_twice_is_computed_again_and_put_back() -> None:
    """A batch failed when it ended: the module's own forward was put back twice."""
    activation = Counted()
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Dropout(0.5), nn.Linear(4, 4), activation)
    plain = gradients(model, 0)
    assert activation.forwards == 2
    again = gradients(model, len(model))
    assert activation.forwards == 2 + 4
    assert all(map(torch.equal, plain, again))
    assert not any("forward" in vars(layer) for layer in model)


def test_no_layer_behind_running_statistics_is_computed_again() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)]
    assert stateless(layers) == layers[:1]
