"""Second halves of backwards in one process: sums, hooks, what stays in the first half, and what an error leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import layers

from evenpipe.megatron.schedule_patches import in_place_of_megatron
from evenpipe.megatron.weight_gradients import linear_layers, linear_weights
from evenpipe.runtime.weight_gradients import WeightGradients, queued_bytes, whole_layers
from evenpipe.schedule import Unit

UNIT = Unit(0, 0)


class Linear(layers.ColumnParallelLinear):  # type: ignore[misc]
    """Without tensor parallelism, which would need ranks."""

    def __init__(self, size: int, fused: bool = False) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.randn(size, size))
        self._fused = fused

    def forward(self, value: Tensor) -> Tensor:
        function = layers.LinearWithGradAccumulationAndAsyncCommunication
        found: Tensor = function.apply(value, self.weight, None, self._fused, False, False, None, None, None)
        return found


class Chunk(torch.nn.Module):
    """Its first layer is used twice, which makes three uses of two weights."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = Linear(4, fused), torch.nn.LayerNorm(4), Linear(4, fused)

    def forward(self, value: Tensor) -> Tensor:
        return self.second(self.norm(self.first(self.first(value)))).square().sum()


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with linear_layers().in_force():
        yield


def gradients(chunk: torch.nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in chunk.parameters()]


def value() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 4, requires_grad=True)


def halves(chunk: torch.nn.Module) -> WeightGradients:
    of_chunk = WeightGradients(chunk, linear_weights(chunk), lambda unit: nullcontext())
    of_chunk.begin()
    return of_chunk


def test_layers_come_in_halves_whatever_calls_the_schedule() -> None:
    """A script whose order is searched has had them whole: what called its schedule did not say what that needs."""
    schedule: Any = SimpleNamespace(needs={"split"})
    assert "linear layers" in [patch.name for patch in in_place_of_megatron(schedule, called=print).list()]


def test_gradients_are_those_of_a_whole_backward_and_hooks_run_once_in_the_second_half() -> None:
    whole, chunk = Chunk(), Chunk()
    whole(value()).backward()
    told: list[str] = []
    for name, parameter in chunk.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: told.append(name))  # type: ignore[misc]
    of_chunk = halves(chunk)
    loss = chunk(value())
    of_chunk.leave(UNIT, lambda: loss.backward() or [])  # type: ignore[no-untyped-call]
    assert sorted(told) == ["norm.bias", "norm.weight"]
    assert chunk.first.weight.grad is None
    of_chunk.compute(UNIT)
    of_chunk.end()
    assert told[2:] == ["second.weight", "first.weight"]
    for ours, theirs in zip(gradients(chunk), gradients(whole), strict=True):
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]


def test_after_an_error_backwards_are_whole_again() -> None:
    chunk = Chunk()
    of_chunk = halves(chunk)

    def fails() -> list[Tensor]:
        raise MemoryError

    with pytest.raises(MemoryError):
        of_chunk.leave(UNIT, fails)
    loss = chunk(value())
    with pytest.raises(RuntimeError, match="a backward outside of the schedule"):
        loss.backward()  # type: ignore[no-untyped-call]
    of_chunk.end()
    chunk(value()).backward()
    assert all(gradient is not None for gradient in gradients(chunk))
    assert not [name for parameter in chunk.parameters() for name in vars(parameter)]


def test_a_weight_that_is_an_embeddings_too_stays_in_the_first_half() -> None:
    chunk = Chunk()
    chunk.embedding = torch.nn.Embedding(4, 4)
    chunk.embedding.weight = chunk.second.weight
    of_chunk = halves(chunk)
    loss = chunk(value())
    of_chunk.leave(UNIT, lambda: loss.backward() or [])  # type: ignore[no-untyped-call]
    assert chunk.second.weight.grad is not None
    assert chunk.first.weight.grad is None
    of_chunk.end()


def test_layers_that_were_not_made_to_delay_are_counted() -> None:
    chunk = Chunk()
    assert whole_layers([chunk]) == 0
    for linear, delays in ((chunk.first, True), (chunk.second, False)):
        linear.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda delays=delays: delays)
    assert whole_layers([chunk]) == 1


def test_two_chunks_that_share_a_weight_are_refused() -> None:
    chunk = Chunk()
    halves(chunk)
    with pytest.raises(ValueError, match="two model chunks of a stage share a weight: take a schedule of whole"):
        halves(chunk)


@pytest.mark.parametrize(("asked", "zeros"), [(False, False), (True, False), (True, True)])
def test_what_a_kernel_has_added_to_main_grad_is_added_once(
    asked: bool, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Any = ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.wgrad_gemm_accum_fp32 = lambda taken, gradient, main_grad: main_grad.add_(gradient.t().matmul(taken))
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    whole, chunk = Chunk(), Chunk(fused=True)
    whole(value()).backward()
    for linear in (chunk.first, chunk.second):
        linear.weight.main_grad = torch.zeros(4, 4)
        if asked:  # as Megatron's data parallelism does
            linear.weight.grad_added_to_main_grad = False
            linear.weight.zero_out_wgrad = zeros
    of_chunk = halves(chunk)
    loss = chunk(value())
    of_chunk.leave(UNIT, lambda: loss.backward() or [])  # type: ignore[no-untyped-call]
    of_chunk.compute(UNIT)
    of_chunk.end()
    for ours, theirs in ((chunk.first, whole.first), (chunk.second, whole.second)):
        torch.testing.assert_close(ours.weight.main_grad, theirs.weight.grad)
        assert (ours.weight.grad is not None) == asked
        assert not asked or ours.weight.grad_added_to_main_grad
        assert not zeros or not ours.weight.grad.any()


def test_what_waits_in_queues_of_layers_is_counted_once() -> None:
    """As Transformer Engine's layers put it there: lists of tensors, and what makes the product of them."""
    layer: Any = torch.nn.Module()
    layer.wgrad_store = SimpleNamespace(context=Queue(), delay_wgrad_compute=lambda: True)
    taken, gradient = torch.zeros(10), torch.zeros(20, dtype=torch.bfloat16)
    for _ in range(2):
        layer.wgrad_store.context.put([[taken, gradient, None], print])
    assert queued_bytes([layer]) == 80
    layer.wgrad_store.delay_wgrad_compute = lambda: False
    assert queued_bytes([layer]) == 0
