"""A micro-batch travels as few tensors: large storages as they are, small ones packed, and memory is free at once."""

import sys
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from evenpipe.runtime.saved import SavedStorage
from evenpipe.runtime.store import PIECE_BYTES, SMALL_BYTES, ActivationStore, grouped

sys.path.insert(0, str(Path(__file__).parent))
from stores import load, shippable

SMALL, LARGE = 1000, SMALL_BYTES // 4  # numbers, of 4 bytes each


class Measured(SavedStorage):
    """A storage of any size, without memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.storage = None


def chain(store: ActivationStore, sizes: list[int]) -> tuple[list[Tensor], list[StorageWeakRef]]:
    """Outputs, one after the other recorded as micro-batch 0, each of which saves a storage of its own; and those."""
    outputs, memory = [], []
    with store.recording(0):
        for size in sizes:
            value = torch.randn(size, requires_grad=True).sin()
            memory.append(StorageWeakRef(value.untyped_storage()))
            outputs.append(value.square().sum())
            del value
    store.seal(0)
    return outputs, memory


@given(st.lists(st.integers(1, 2 * SMALL_BYTES) | st.integers(1, 1000), max_size=60))
def test_small_storages_travel_together_and_large_ones_alone(sizes: list[int]) -> None:
    groups = grouped([Measured(size) for size in sizes])
    alone = [group[0].nbytes for group in groups if group[0].nbytes >= SMALL_BYTES]
    pieces = [[saved.nbytes for saved in group] for group in groups if group[0].nbytes < SMALL_BYTES]
    assert alone == [size for size in sizes if size >= SMALL_BYTES]
    assert [size for piece in pieces for size in piece] == [size for size in sizes if size < SMALL_BYTES]
    assert all(sum(piece) <= PIECE_BYTES for piece in pieces)
    assert len(pieces) <= -(-sum(map(sum, pieces)) // (PIECE_BYTES - SMALL_BYTES))


def test_what_is_packed_is_free_at_once_and_what_is_large_is_not_copied() -> None:
    store = ActivationStore()
    outputs, memory = chain(store, [SMALL, LARGE, SMALL, SMALL])
    before = store.counter.own_bytes
    message = store.ship(0)
    assert [tensor.numel() for tensor in message] == [12 * SMALL, 4 * LARGE]
    assert [storage.expired() for storage in memory] == [True, False, True, True]
    assert store.counter.own_bytes == before  # the piece counts for as long as it is there
    assert len(store.release(0)) == 2
    assert store.counter.own_bytes == before - 12 * SMALL - 4 * LARGE
    del message
    assert memory[1].expired()
    del outputs


def test_every_storage_has_memory_of_its_own_again_and_the_piece_is_free() -> None:
    """What autograd lets go of one by one in backward is free one by one."""
    store = ActivationStore()
    outputs, _ = chain(store, [SMALL, LARGE, SMALL, SMALL])
    before = store.counter.own_bytes
    copies = [tensor.clone() for tensor in shippable(store, 0)]
    store.release(0)
    pieces = [StorageWeakRef(tensor.untyped_storage()) for tensor in store.refill(0)]
    assert store.counter.own_bytes == before
    store.unpack(0)
    assert [piece.expired() for piece in pieces] == [True, False]
    assert store.counter.own_bytes == before
    outputs.pop(0)
    assert store.counter.own_bytes == before - 8 * SMALL  # what sin and square saved
    del copies


def test_one_small_storage_is_not_copied() -> None:
    store = ActivationStore()
    outputs, memory = chain(store, [SMALL])
    message = store.ship(0)
    assert not memory[0].expired()
    del message, outputs


def test_micro_batches_that_die_on_their_way_are_not_counted() -> None:
    """A stream that is broken off forgets what has been forwarded, wherever it is."""
    for steps in range(3):
        store = ActivationStore()
        outputs, _ = chain(store, [SMALL, LARGE, SMALL])
        for step in (store.ship, store.release, store.refill)[: steps + 1]:
            step(0)
        del outputs
        assert (store.counter.own_bytes, store.counter.own_units) == (0, 0)
        store.release(0)
        store.unpack(0)
        assert (store.counter.own_bytes, store.counter.own_units) == (0, 0)
        store.assert_empty()


def test_a_micro_batch_may_leave_again() -> None:
    store = ActivationStore()
    x = torch.randn(SMALL, requires_grad=True)
    with store.recording(0):
        y = x.sin().exp().tanh().sum()
    for _ in range(3):
        copies = [tensor.clone() for tensor in shippable(store, 0)]
        assert len(copies) == 1
        store.release(0)
        load(store, 0, copies)
    y.backward()
    assert x.grad is not None
    again = x.detach().requires_grad_()
    again.sin().exp().tanh().sum().backward()
    assert torch.equal(x.grad, again.grad)
