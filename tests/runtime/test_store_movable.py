"""What the activation store moves, and what it leaves: whatever anybody else holds, or cannot be rebuilt."""

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from evenpipe.runtime.store import ActivationStore

sys.path.insert(0, str(Path(__file__).parent))
from stores import evict, load, shippable

torch.set_num_threads(1)


def test_what_others_hold_is_not_moved() -> None:
    """A slice of the data set, a mask that the caller keeps, a module's buffer and a tensor kept on a ctx."""

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x * 2
            ctx.save_for_backward(y)
            ctx.kept = y.detach()
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * ctx.saved_tensors[0]

    data_set, mask, buffer = torch.randn(100, 4), torch.ones(4), torch.ones(4)
    w = nn.Parameter(torch.randn(4))
    store = ActivationStore([w])
    with store.recording(0):
        y = Keeps.apply(data_set[3:5] * w * mask * buffer).exp()
    assert store.counter.own_bytes == 1600 + 16 + 16 + 32 + 32
    assert [view.numel() for view in shippable(store, 0)] == []
    del y
    assert store.counter.own_bytes == 0


def test_python_references_to_a_storage_count_as_holders() -> None:
    x = torch.randn(4, requires_grad=True)
    store = ActivationStore()
    with store.recording(0):
        y = x.exp()
        z = y * y
    storage = y.untyped_storage()
    del y
    assert shippable(store, 0) == []
    del storage
    assert len(shippable(store, 0)) == 1
    del z


def test_what_was_sealed_moves_whoever_holds_it_by_then() -> None:
    """Messages under way hold memory for as long as they happen to take; what moves must not depend on it."""
    x = torch.randn(4, requires_grad=True)
    store = ActivationStore()
    with store.recording(0):
        y = x.exp()
        z = y * y
    assert (store.seal(0), store.ship(0)) == ((), [])
    message = y.detach()
    del y
    assert store.seal(0) == ()
    del message
    assert store.seal(0) == (16,)
    assert [view.numel() for view in store.ship(0)] == [16]
    del z


def test_the_received_input_goes_with_its_micro_batch() -> None:
    """Graph and caller keep the input's tensor alive, so its memory is free only if the tensor lets go of it."""
    received = torch.randn(4, 8).requires_grad_()
    values = received.detach().clone()
    memory = StorageWeakRef(received.untyped_storage())
    store = ActivationStore()
    with store.recording(0):
        y = received.sin()
    assert shippable(store, 0) == []
    store.attach(0, received)
    store.attach(0, received)  # saying it twice makes it no second holder
    (copy,) = evict(store, 0)
    assert received.numel() == 0
    assert memory.expired()
    load(store, 0, [copy])
    assert torch.equal(received, values)
    y.sum().backward()
    assert received.grad is not None
    assert torch.equal(received.grad, values.cos())


def test_an_input_that_autograd_did_not_save_is_left_alone() -> None:
    received = torch.randn(4).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        y = (received + 1).exp()
    store.attach(0, received)
    z = y + 1
    del y
    evict(store, 0)
    assert received.numel() == 4
    del z


def test_attaching_keeps_nothing_alive() -> None:
    received = torch.randn(4).requires_grad_()
    gone = weakref.ref(received)
    store = ActivationStore()
    with store.recording(0):
        y = received.sin()
    store.attach(0, received)
    del received, y
    assert gone() is None


@pytest.mark.parametrize("bit", ["conjugate", "negative"])
def test_lazily_conjugated_and_negated_tensors_stay(bit: str) -> None:
    """Geometry does not tell them from their base."""
    x = torch.randn(4, dtype=torch.complex64).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        lazy = (x * 1).conj() if bit == "conjugate" else (x * 1).conj().imag
        assert lazy.is_conj() or lazy.is_neg()
        y = lazy * lazy
    del lazy
    assert shippable(store, 0) == []
    y.abs().sum().backward()
    assert x.grad is not None


def test_only_the_given_device_is_moved() -> None:
    x = torch.randn(4).requires_grad_()
    store = ActivationStore(device="meta")
    with store.recording(0):
        y = x.exp().exp()
    assert shippable(store, 0) == []
    del y


def test_empty_storages_are_not_moved() -> None:
    x = torch.randn(0).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        y = x.exp().exp().sum()
    assert shippable(store, 0) == []
    y.backward()


def test_a_torch_that_cannot_tell_holders_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    x = torch.randn(4).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        y = x.exp().exp()
    with pytest.raises(RuntimeError, match="cannot tell who else holds saved memory"):
        store.seal(0)
    del y
