"""Recomputed layers save their inputs, however they are given, and train to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenpipe.runtime.recomputed_layers import recomputing_layers, stateless
from evenpipe.runtime.store import ActivationStore

WIDTH = 64


class Layer(nn.Module):
    """Takes and gives its tensor in a tuple, in a mapping, by name, or alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any = None, *, named: Tensor | None = None) -> Any:
        kind = type(given)
        tensor = named if given is None else given[0] if kind is tuple else given["x"] if kind is dict else given
        outputs = nn.functional.dropout(torch.tanh(self.linear(torch.relu(tensor))), 0.2)
        return (outputs, "a note") if kind is tuple else {"x": outputs} if kind is dict else outputs


GIVEN = {
    "alone": lambda layer, tensor: layer(tensor),
    "by name": lambda layer, tensor: layer(named=tensor),
    "in a tuple": lambda layer, tensor: layer((tensor, "a note"))[0],
    "in a mapping": lambda layer, tensor: layer({"x": tensor})["x"],
}


@pytest.mark.parametrize("way", GIVEN)
@pytest.mark.parametrize("again", [False, True])
def test_a_recomputed_layer_saves_its_input_and_nothing_else(way: str, again: bool) -> None:
    torch.manual_seed(0)
    layer = Layer()
    store = ActivationStore(layer.parameters())
    tensor = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def train(recomputed: list[nn.Module]) -> tuple[int, Tensor, Tensor]:
        torch.manual_seed(1)
        layer.zero_grad()
        with recomputing_layers(recomputed):
            with store.recording(0):
                outputs = GIVEN[way](layer, tensor * 2)
            saved = store.nbytes(0)
            torch.rand(3)  # what other micro-batches draw
            outputs.pow(2).sum().backward()
        [weight, _] = [one.grad for one in layer.parameters()]
        assert weight is not None
        return saved, outputs.detach(), weight.clone()

    _, *expected = train([])
    saved, *found = train([layer] if again else [])
    assert all(map(torch.equal, found, expected))
    assert (saved == tensor.nbytes) == again


def test_a_layer_that_is_there_twice_is_recomputed_and_is_itself_again_afterwards() -> None:
    layer, changed = Layer(), Layer()
    own = changed.forward = lambda given: given
    with recomputing_layers([layer, changed, layer]):
        assert "forward" in vars(layer)
        assert changed.forward is not own
    assert "forward" not in vars(layer)
    assert changed.forward is own


def test_no_layer_behind_running_statistics_is_recomputed() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)]
    assert stateless(layers) == layers[:1]
