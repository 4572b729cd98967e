"""A stage of plain modules: a backward in two halves gives the bits of the whole one, whatever the module returns."""

import pytest
import torch

from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.schedule import FORWARD, Unit

UNIT = Unit(0)


class Chunk(torch.nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.compute = compute

    def forward(self, value):
        return self.compute(self.linear, value)


def gradients(compute, halves):
    """Of the input, and of the weights."""
    torch.manual_seed(0)
    chunk = Chunk(compute)
    stage = ModuleStage([chunk], Edges.alike(torch.empty(4, 4)), None, None, loss_chunk=None)
    inputs = stage.receive_buffers(FORWARD, UNIT)
    with torch.no_grad():
        inputs[0].copy_(torch.randn(4, 4))
    stage.forward(UNIT, inputs)
    given = [torch.randn(4, 4)]
    if not halves:
        return [*stage.backward(UNIT, given), chunk.linear.weight.grad]
    found = stage.backward_input(UNIT, given)
    assert chunk.linear.weight.grad is None
    stage.backward_weight(UNIT)
    return [*found, chunk.linear.weight.grad]


@pytest.mark.parametrize(
    "compute",
    [
        lambda linear, value: linear(value),
        lambda linear, value: linear(value).t(),
        lambda linear, value: torch.cat([linear(value), value])[:4],
        lambda linear, value: linear(linear(value)).relu_(),
        lambda linear, value: value,
    ],
    ids=["module", "view", "slice", "twice in place", "nothing to train"],
)
def test_two_halves_of_a_backward_are_the_whole_one(compute):
    for half, whole in zip(gradients(compute, True), gradients(compute, False), strict=True):
        assert (half is None and whole is None) or torch.equal(half, whole)
