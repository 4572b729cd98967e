"""A stage of plain modules: a backward in two halves gives the bits of the whole one, whatever the module returns."""

from contextlib import nullcontext

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


def gradients(compute, halves, outputs=1, left=True):
    """Of the input, and of the weights."""
    torch.manual_seed(0)
    chunk = Chunk(compute)
    edges = Edges.alike(torch.empty(4, 4))
    edges = edges._replace(given=[outputs * list(edges.given[0])])
    recording = (lambda unit: nullcontext()) if halves else None
    stage = ModuleStage([chunk], edges, None, None, loss_chunk=None, recording=recording)
    inputs = stage.receive_buffers(FORWARD, UNIT)
    with torch.no_grad():
        inputs[0].copy_(torch.randn(4, 4))
    stage.forward(UNIT, inputs)
    given = [torch.randn(4, 4) for _ in range(outputs)]
    if not halves:
        return [*stage.backward(UNIT, given), chunk.linear.weight.grad]
    found = stage.backward_input(UNIT, given)
    assert chunk.linear.weight.grad is None or not left
    stage.backward_weight(UNIT)
    return [*found, chunk.linear.weight.grad]


class TwoResults(torch.autograd.Function):
    """Two results of different shapes, each of both arguments."""

    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(value, weight)
        return value @ weight, (value * weight).sum(0)

    @staticmethod
    def backward(ctx, first, second):
        value, weight = ctx.saved_tensors
        return first @ weight.t() + second * weight, value.t() @ first + second * value


def test_a_branch_that_starts_within_a_stage_has_its_weights_gradients_too():
    """Of three outputs, one does not depend on what is taken, and one depends on both."""

    def compute(linear, value):
        begun = linear(torch.ones(4, 4))
        return value, begun, torch.tanh(begun) * value

    found = [gradients(compute, halves, outputs=3) for halves in (True, False)]
    for half, whole in zip(*found, strict=True):
        assert torch.equal(half, whole)


@pytest.mark.parametrize(
    "compute",
    [
        lambda linear, value: linear(value),
        lambda linear, value: linear(value).t(),
        lambda linear, value: torch.cat([linear(value), value])[:4],
        lambda linear, value: linear(linear(value)).relu_(),
        lambda linear, value: linear(linear(linear(value)).tanh()),
        lambda linear, value: torch.softmax(linear(value), -1),
        lambda linear, value: value,
    ],
    ids=[
        *("module", "view", "slice", "twice in place", "thrice", "saved by its own operation", "nothing to train"),
    ],
)
def test_two_halves_of_a_backward_are_the_whole_one(compute):
    for half, whole in zip(gradients(compute, True), gradients(compute, False), strict=True):
        assert (half is None and whole is None) or torch.equal(half, whole)


def test_a_function_with_two_results_and_a_backward_of_its_own_has_its_gradients_in_the_first_half():
    def compute(linear, value):
        return sum(TwoResults.apply(value, linear.weight))

    for half, whole in zip(gradients(compute, True, left=False), gradients(compute, False), strict=True):
        assert torch.equal(half, whole)


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


def sent(compute, boundary=None):
    """What a stage whose chunk computes so hands on where the next one receives tensors like `boundary`."""
    edges = Edges.alike(torch.empty(4, 4) if boundary is None else boundary)
    stage = ModuleStage([Chunk(compute)], edges, lambda micro_batch: torch.randn(4, 4), None, loss_chunk=None)
    return stage.forward(UNIT, None)


def test_under_autocast_what_is_sent_must_be_what_the_next_stage_receives():
    """Otherwise bytes of bf16 would be read as fp32."""
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"output 0 .*bfloat16, .*float32: torch.autocast is on") as it:
            sent(lambda linear, value: linear(value))
        assert "\n" not in str(it.value)
        (found,) = sent(lambda linear, value: linear(value), torch.empty(4, 4, dtype=torch.bfloat16))
    assert found.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (lambda linear, value: linear(value)[:3], r"\(3, 4\), .*receives \(4, 4\), .*micro-batches of one size"),
        (lambda linear, value: linear(value).double(), "cast what is handed on, or make the pipeline for this dtype"),
        (lambda linear, value: linear(value).to_sparse(), "is torch.sparse_coo: parts hand on dense tensors"),
        (lambda linear, value: (linear(value), value), "its output is 2 tensors, and the next part receives 1"),
    ],
    ids=["a shorter micro-batch", "another dtype", "another layout", "another number"],
)
def test_what_does_not_fit_the_edge_is_refused_before_it_travels(compute, says):
    with pytest.raises(ValueError, match=says):
        sent(compute)


@pytest.mark.parametrize("halves", [False, True])
def test_what_frozen_parameters_give_has_no_backward_and_what_comes_back_is_dropped(halves):
    chunk = Chunk(lambda linear, value: (linear(value), value * 2))
    chunk.linear.requires_grad_(False)
    edges = Edges.alike(torch.empty(4, 4))
    edges = edges._replace(given=[2 * list(edges.given[0])])
    stage = ModuleStage([chunk], edges, lambda _: torch.ones(4, 4), None, loss_chunk=None)
    assert not any(one.requires_grad for one in stage.forward(UNIT, None))
    assert (stage.backward_input if halves else stage.backward)(UNIT, [torch.ones(4, 4)] * 2) == []
    if halves:
        stage.backward_weight(UNIT)
    assert chunk.linear.weight.grad is None
