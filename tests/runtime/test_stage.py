"""A stage of plain modules: a backward in two halves gives the bits of the whole one, whatever the module returns."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

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


def gradients(compute, halves, outputs=1):
    """Of the input, and of the weights."""
    torch.manual_seed(0)
    chunk = Chunk(compute)
    edges = Edges.alike(torch.empty(4, 4))
    edges = edges._replace(given=[outputs * list(edges.given[0])])
    stage = ModuleStage([chunk], edges, None, None, loss_chunk=None)
    inputs = stage.receive_buffers(FORWARD, UNIT)
    with torch.no_grad():
        inputs[0].copy_(torch.randn(4, 4))
    stage.forward(UNIT, inputs)
    given = [torch.randn(4, 4) for _ in range(outputs)]
    if not halves:
        return [*stage.backward(UNIT, given), chunk.linear.weight.grad]
    found = stage.backward_input(UNIT, given)
    assert chunk.linear.weight.grad is None
    stage.backward_weight(UNIT)
    return [*found, chunk.linear.weight.grad]


def test_a_branch_that_starts_within_a_stage_has_its_weights_gradients_too():
    """Of three outputs, one does not depend on what is taken, and one depends on both."""

    def compute(linear, value):
        begun = linear(torch.ones(4, 4))
        return value, begun, torch.tanh(begun) * value

    found = [gradients(compute, halves, outputs=3) for halves in (True, False)]
    for half, whole in zip(*found, strict=True):
        torch.testing.assert_close(half, whole)


@pytest.mark.parametrize(
    "compute",
    [
        lambda linear, value: linear(value),
        lambda linear, value: linear(value).t(),
        lambda linear, value: torch.cat([linear(value), value])[:4],
        lambda linear, value: linear(linear(value)).relu_(),
        lambda linear, value: torch.softmax(linear(value), -1),
        lambda linear, value: value,
    ],
    ids=["module", "view", "slice", "twice in place", "saved by its own operation", "nothing to train"],
)
def test_two_halves_of_a_backward_are_the_whole_one(compute):
    for half, whole in zip(gradients(compute, True), gradients(compute, False), strict=True):
        assert (half is None and whole is None) or torch.equal(half, whole)


@pytest.mark.parametrize("halves", [False, True])
def test_what_has_been_sent_on_is_held_by_nobody_who_does_not_need_it(halves):
    """No backward needs the result of a product with a number; its gradient is that of the whole."""
    chunk = Chunk(lambda linear, value: linear(value) * 3)
    stage = ModuleStage([chunk], Edges.alike(torch.empty(4, 4)), None, None, loss_chunk=None)
    inputs = stage.receive_buffers(FORWARD, UNIT)
    with torch.no_grad():
        inputs[0].copy_(torch.randn(4, 4))
    (sent,) = stage.forward(UNIT, inputs)
    memory = StorageWeakRef(sent.untyped_storage())
    del sent
    assert memory.expired()
    (found,) = (stage.backward_input if halves else stage.backward)(UNIT, [torch.ones(4, 4)])
    torch.testing.assert_close(found, 3 * chunk.linear.weight.sum(0).expand(4, 4))
