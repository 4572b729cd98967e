"""The activation store counts each saved storage once, for as long as it lives, and tells which of them may leave."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from evenpipe.runtime.memory import MemoryCounter
from evenpipe.runtime.store import ActivationStore

sys.path.insert(0, str(Path(__file__).parent))
from stores import evict, load, shippable

torch.set_num_threads(1)


def test_bytes_are_those_of_the_storages_saved_counted_once() -> None:
    """sin saves its input (x: 48 bytes), the product both factors (sin and cos: 48 each), cos its input (x again)."""
    x = torch.randn(12).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        y = (x.sin() * x.cos()).sum()
    assert store.nbytes(0) == store.counter.own_bytes == 3 * 48
    y.backward()
    assert store.counter.own_bytes == 0
    assert store.counter.peak_bytes == 3 * 48


def test_a_view_holds_its_whole_storage() -> None:
    x = torch.randn(100, 10)
    w = nn.Parameter(torch.randn(10))
    store = ActivationStore([w])
    with store.recording(0):
        y = x[:1] * w
    assert store.counter.own_bytes == 100 * 10 * 4
    del y
    assert store.counter.own_bytes == 0


def test_parameters_are_neither_counted_nor_moved() -> None:
    linear = nn.Linear(8, 8)
    store = ActivationStore(linear.parameters())
    x = torch.randn(2, 8)
    with store.recording(0):
        y = linear(linear(x))
    assert store.counter.own_bytes == 2 * (2 * 8 * 4)  # x and the first result
    assert [view.numel() for view in shippable(store, 0)] == [2 * 8 * 4]  # x is ours to keep
    del y


def test_parameters_are_recognised_after_their_data_was_exchanged() -> None:
    """Wrappers that shard or flatten parameters set `.data` long after the store was made."""
    linear = nn.Linear(8, 8, bias=False)
    store = ActivationStore(linear.parameters())
    linear.weight.data = torch.randn(64)[:64].view(8, 8)
    with store.recording(0):
        y = linear(torch.randn(2, 8).requires_grad_())
    assert store.counter.own_bytes == 2 * 8 * 4
    del y


def test_backward_sees_a_parameter_s_present_data() -> None:
    """As under plain autograd: a leaf saved as it is follows its `.data`."""
    w = nn.Parameter(torch.tensor([2.0]))
    x = torch.tensor([1.0], requires_grad=True)
    store = ActivationStore([w])
    with store.recording(0):
        y = x * w
    w.data = torch.tensor([5.0])
    y.backward()
    assert x.grad is not None
    assert x.grad.item() == 5.0


def test_a_mask_shared_by_micro_batches_counts_once_and_stays() -> None:
    w = nn.Parameter(torch.randn(4))
    store = ActivationStore([w])
    mask = torch.ones(4)
    outputs = []
    for key in (0, 1):
        with store.recording(key):
            outputs.append(w * mask)
    del mask  # now only autograd holds it, twice
    assert store.counter.own_bytes == 16
    assert shippable(store, 0) == shippable(store, 1) == []
    store.release(0)
    outputs[1].sum().backward()
    assert (store.nbytes(0), store.counter.own_bytes) == (16, 16)
    assert store.refill(0) == []
    outputs[0].sum().backward()
    assert store.counter.own_bytes == 0


def test_in_place_modification_of_a_saved_tensor_is_still_an_error() -> None:
    """Saved-tensor hooks switch autograd's own check off; a wrong gradient would follow without a word."""
    x = torch.randn(4).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        a = x * 1.0
        y = (a * a).sum()
    a.add_(1.0)
    with pytest.raises(RuntimeError, match="modified in place before its backward"):
        y.backward()


def test_memory_goes_as_backward_goes() -> None:
    """Handles die node by node, so half-way through backward only the rest is counted."""
    x = torch.randn(25).requires_grad_()
    store = ActivationStore()
    seen: list[int] = []
    with store.recording(0):
        a = x.exp()
        b = a.exp()
        c = b.exp()
    a.register_hook(lambda grad: seen.append(store.counter.own_bytes))
    del a, b
    c.sum().backward()
    assert seen == [100]  # a, for its own node
    store.assert_empty()
    assert store.counter.own_bytes == 0
    del c


def test_leftovers_are_named_and_a_graph_that_is_dropped_leaves_nothing_here_or_away() -> None:
    for away in (False, True):
        x = torch.randn(4).requires_grad_()
        store = ActivationStore()
        with store.recording(0):
            y = x.exp().exp()
        store.attach(0, x)
        with pytest.raises(RuntimeError, match="outlive the batch: 32 bytes of micro-batches 0"):
            store.assert_empty()
        if away:
            evict(store, 0)
        assert store.leftover() == [0]
        del y
        store.assert_empty()
        assert store.leftover() == []
        assert (store.counter.own_bytes, store.counter.own_units) == (0, 0)


def test_tensor_subclasses_and_sparse_tensors_stay_as_they_are() -> None:
    class Tagged(Tensor):
        pass

    w = nn.Parameter(torch.randn(4))
    tagged = torch.ones(4).as_subclass(Tagged)
    sparse = torch.eye(4).to_sparse()
    dense = torch.randn(4, 2).requires_grad_()
    store = ActivationStore([w])
    with store.recording(0):
        y = w * tagged
        z = torch.sparse.mm(sparse, dense)
    assert store.lasting_bytes == {"Tagged": 16, "torch.sparse_coo": 4 * (2 * 8 + 4)}
    assert shippable(store, 0) == []
    (y.sum() + z.sum()).backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.ones(4))


def test_an_output_that_stays_as_it_is_does_not_hold_its_own_graph() -> None:
    """Softmax saves its result; kept with its history, it would keep the node that keeps it, for ever."""
    x = torch.eye(4).to_sparse().requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        y = torch.sparse.softmax(x, 1)
    assert store.lasting_bytes == {"torch.sparse_coo": 2 * 4 * (2 * 8 + 4)}  # its input and its result
    memory = StorageWeakRef(y.detach()._values().untyped_storage())
    del y
    assert memory.expired()


def test_two_blocks_with_one_key_are_one_micro_batch() -> None:
    x = torch.randn(4).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        y = x.exp().exp()
    with store.recording(0):
        z = y.exp().exp()
    del y
    assert store.counter.own_units == 1
    load(store, 0, evict(store, 0))
    z.sum().backward()
    store.assert_empty()


def test_nothing_saved_means_nothing_live() -> None:
    store = ActivationStore()
    with store.recording(0), torch.no_grad():
        torch.ones(4).exp()
    assert (store.leftover(), store.counter.own_units, store.counter.peak_units) == ([], 0, 1)
    assert shippable(store, 0) == store.refill(0) == []
    store.release(0)
    assert store.nbytes(0) == 0


def test_the_peak_is_the_hand_computed_sum() -> None:
    """Three micro-batches of 800 bytes each; one is away while the third is made."""
    counter = MemoryCounter()
    store = ActivationStore(counter=counter)
    outputs = []

    def forward(key: int) -> None:
        x = torch.randn(100).requires_grad_()
        with store.recording(key):
            outputs.append(x.sin().exp().sin().sum())
        store.attach(key, x)

    forward(0)
    one = store.nbytes(0)
    assert one == 2 * 400  # x for sin; exp's result, for exp and for the outer sin
    forward(1)
    copies = evict(store, 0)
    assert counter.own_bytes == one
    forward(2)
    assert (counter.peak_bytes, counter.peak_units) == (2 * one, 2)
    outputs[1].backward()
    load(store, 0, copies)
    outputs[2].backward()
    outputs[0].backward()
    assert (counter.peak_bytes, counter.peak_units, counter.evicted_bytes) == (2 * one, 2, one)
    store.assert_empty()


def test_a_collective_under_way_keeps_no_recording_alive() -> None:
    """Its work carries the hooks of the block it was started in, and once made a finished micro-batch count as live."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    store = ActivationStore()
    x = torch.ones(4, requires_grad=True)
    with store.recording(0):
        work = group.allreduce([torch.ones(4)])
        y = x.exp()
    work.wait()
    y.sum().backward()
    del y
    assert (store.leftover(), store.counter.own_units) == ([], 0)
    del work


def test_an_output_that_is_emptied_until_backward_is_not_counted() -> None:
    """Megatron discards outputs that it recomputes later: what the next operation saved of them is then empty."""
    x = torch.randn(25).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        discarded = x.sin()
        y = (discarded * discarded).sum()
        discarded.untyped_storage().resize_(0)
    assert (store.nbytes(0), store.counter.own_bytes, store.counter.peak_bytes) == (100, 100, 100)  # x
    del discarded
    assert shippable(store, 0) == []
    del y
    assert store.counter.own_bytes == 0


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


@pytest.mark.parametrize(("numbers", "device"), [(0, None), (4, "meta")])
def test_empty_storages_and_those_of_other_devices_are_not_moved(numbers: int, device: str | None) -> None:
    x = torch.randn(numbers).requires_grad_()
    store = ActivationStore(device=device)
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
