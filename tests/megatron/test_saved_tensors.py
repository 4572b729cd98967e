"""Recorded autograd functions find the leaves themselves: fused gradients and recomputed regions depend on it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parent))
import fused_kernel

from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.runtime.store import ActivationStore
from evenpipe.upstream import PatchSet
from evenpipe.upstream.saved_leaves import keeping_identity, keeps_identity

ONE = SimpleNamespace(size=lambda: 1)


@pytest.fixture
def patched() -> Iterator[PatchSet]:
    patches = PatchSet("fusion", [keeping_identity()])
    patches.apply()
    yield patches
    patches.revert()


@pytest.fixture
def cpu() -> Iterator[None]:
    mode = cpu_mode()
    mode.apply()
    yield
    mode.revert()


@pytest.fixture
def fused_linear(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor, nn.Parameter], Tensor]:
    """Megatron's fused linear layer, on one process."""
    from megatron.core.tensor_parallel import layers

    fused_kernel.install()
    monkeypatch.setattr(layers, fused_kernel.NAME, sys.modules[fused_kernel.NAME], raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))

    def linear(x: Tensor, weight: nn.Parameter) -> Tensor:
        function = layers.LinearWithGradAccumulationAndAsyncCommunication
        extra = (1,) if "gtp_remat_size" in function.forward.__code__.co_varnames else ()
        out: Tensor = function.apply(x, weight, None, True, False, False, None, None, ONE, *extra)
        return out

    return linear


class Sees(torch.autograd.Function):
    """Keeps what its backward finds in `saved_tensors` under `found`."""

    found: tuple[Any, ...] = ()

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors, None)
        return torch.stack([tensor.sum() for tensor in tensors]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        Sees.found = ctx.saved_tensors
        return tuple(torch.ones_like(tensor) * gradient for tensor in ctx.saved_tensors[:-1])


def weight_of_ddp() -> nn.Parameter:
    """A weight (3, 4) with what Megatron's data-parallel wrapper puts on it."""
    weight = nn.Parameter(torch.randn(3, 4))
    weight.main_grad = torch.zeros(3, 4)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return weight


def recorded(*tensors: Tensor, parameters: tuple[Tensor, ...] = ()) -> None:
    """What `Sees` finds of `tensors`, if its forward was recorded."""
    with ActivationStore(parameters).recording(0):
        y = Sees.apply(*tensors)
    y.backward()


@pytest.mark.usefixtures("patched")
def test_a_fused_gradient_is_announced_and_has_a_placeholder(fused_linear: Callable[..., Tensor]) -> None:
    """Without the placeholder, no stream waits for the kernel before the reduction that the parameter's hook starts."""
    weight, x = weight_of_ddp(), torch.randn(5, 2, 4)
    seen: list[tuple[bool, bool]] = []
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulator.register_hook(lambda *_: seen.append((weight.grad is not None, weight.grad_added_to_main_grad)))
    with ActivationStore([weight]).recording(0):
        y = fused_linear(x, weight)
    y.sum().backward()
    assert seen == [(True, True)]
    assert torch.allclose(weight.main_grad, x.sum((0, 1)).expand(3, 4))  # type: ignore[arg-type]


@pytest.mark.usefixtures("patched")
def test_a_tied_weight_gets_a_placeholder_of_zeros(fused_linear: Callable[..., Tensor]) -> None:
    """Its other use gives a real gradient, to which autograd adds the placeholder."""
    weight = weight_of_ddp()
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    with ActivationStore([weight]).recording(0):
        y = fused_linear(torch.randn(5, 2, 4), weight).sum() + nn.functional.embedding(torch.tensor([1]), weight).sum()
    y.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 4))
    assert weight.grad_added_to_main_grad


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA")
@pytest.mark.usefixtures("patched", "cpu")
def test_a_region_that_is_recomputed_without_its_output_passes_its_gradient_on() -> None:
    """0.14 and 0.15 look for the gradient of the region's input in what they find in `saved_tensors` once more."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    norm, linear, x = nn.LayerNorm(8), nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    leaves = [x, norm.weight, linear.weight]

    def gradients(recorded: bool) -> list[Tensor | None]:
        store = ActivationStore([*norm.parameters(), *linear.parameters()])
        with store.recording(0) if recorded else nullcontext():
            region = CheckpointWithoutOutput(fp8=None)
            y = linear(region.checkpoint(norm, x * 2))
            region.discard_output_and_register_recompute(y)
            z = y.exp().sum()
            del y
        if recorded:
            # The region's input, which autograd keeps itself, and exp's result; the norm's was discarded.
            assert store.counter.own_bytes == 2 * 128
            assert store.seal(0) == (128,)
        z.backward()
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    for plain, other in zip(gradients(recorded=False), gradients(recorded=True), strict=True):
        assert plain is not None
        assert other is not None
        assert torch.equal(plain, other)


@pytest.mark.usefixtures("patched")
def test_leaves_come_back_themselves() -> None:
    class Marked(Tensor):
        """As FP8 parameters, whose type hooks return changed or not."""

    plain, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    marked, received = nn.Parameter(torch.ones(2).as_subclass(Marked)), torch.ones(2, requires_grad=True)
    recorded(plain, plain, frozen, marked, received, received * 2, parameters=(plain, frozen, marked))
    assert all(a is b for a, b in zip(Sees.found, (plain, plain, frozen, marked, received), strict=False))
    assert torch.equal(Sees.found[5], torch.full((2,), 2.0))
    assert Sees.found[6] is None


@pytest.mark.usefixtures("patched")
def test_a_received_input_comes_back_with_its_values() -> None:
    received = torch.arange(3.0).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        y = Sees.apply(received)
    store.attach(0, received)
    store.seal(0)
    copies = [view.clone() for view in store.ship(0)]
    store.release(0)
    assert received.numel() == 0
    for view, copy in zip(store.refill(0), copies, strict=True):
        view.copy_(copy)
    store.unpack(0)
    y.backward()
    assert Sees.found[0] is received
    assert torch.equal(received, torch.arange(3.0))


@pytest.mark.usefixtures("patched")
def test_what_was_not_recorded_is_as_ever() -> None:
    plain, received = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    Sees.apply(plain, received).backward()
    assert Sees.found[0] is plain
    assert Sees.found[1] is received


def test_the_patch_can_be_taken_off(patched: PatchSet) -> None:
    assert keeps_identity()
    patched.revert()
    assert not keeps_identity()
    parameter = nn.Parameter(torch.ones(2))
    recorded(parameter, parameters=(parameter,))
    assert Sees.found[0] is not parameter
