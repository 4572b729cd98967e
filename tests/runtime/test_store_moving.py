"""The activation store sends what only autograd holds away and back, as few tensors; gradients cannot tell."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from evenpipe.runtime.saved import SavedStorage
from evenpipe.runtime.store import PIECE_BYTES, SMALL_BYTES, ActivationStore, grouped

sys.path.insert(0, str(Path(__file__).parent))
from stores import evict, load, shippable

torch.set_num_threads(1)


class InPlace(nn.Module):
    """Modifies tensors in place before and after autograd saves others, and saves an output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.mul_(2.0)
        y.relu_()
        z = y + 1.0
        z.add_(y)  # neither is needed for backward by anything before
        return z.exp_()


class Views(nn.Module):
    """One storage, saved as slices, transposes and expanded views."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        return (scores @ v) * q[:, :1].expand_as(v)


class Checkpointed(nn.Module):
    """Recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.outer = nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(checkpoint(self.inner, torch.tanh(x), use_reentrant=self.reentrant))
        return out


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, factor = ctx.saved_tensors
        assert ctx.saved_tensors[0].data_ptr() == x.data_ptr()
        return grad * factor, (grad * x).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Scale.apply(x.sin(), self.factor)
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3))


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "transformer layer with dropout": lambda: nn.Sequential(nn.Unflatten(0, (2, 3)), transformer_layer()),
    "relu saves its output": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.ReLU()),
    "in-place operations": InPlace,
    "views": Views,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "custom function": Custom,
    "bf16": lambda: mlp().to(torch.bfloat16),
}


def step(module: nn.Module, away: bool) -> list[Tensor]:
    """Forward and backward of one micro-batch; return the output and every gradient, the input's first."""
    torch.manual_seed(1)
    module.zero_grad()
    parameters = list(module.parameters())
    x = torch.randn(6, 8).to(parameters[0].dtype).requires_grad_()
    store = ActivationStore(parameters)
    with store.recording("F0"):
        y = module(x)
    store.attach("F0", x)
    if away:
        before = store.counter.own_bytes
        copies = evict(store, "F0")
        assert copies
        assert store.counter.own_bytes == before - sum(copy.numel() for copy in copies)
        torch.randn(1000)  # takes the memory that was freed
        load(store, "F0", copies)
        assert store.counter.own_bytes == before
    y.float().square().sum().backward()
    store.assert_empty()
    assert store.counter.own_bytes == 0
    gradients = [p.grad for p in (x, *parameters)]
    return [y.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bitwise_the_same_after_a_round_trip(name: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]()
    stayed, returned = step(module, away=False), step(module, away=True)
    assert len(stayed) > 1
    assert all(torch.equal(a, b) for a, b in zip(stayed, returned, strict=True))


def test_gradients_are_those_of_plain_autograd() -> None:
    torch.manual_seed(0)
    module = mlp()
    recorded = step(module, away=True)
    torch.manual_seed(1)
    module.zero_grad()
    x = torch.randn(6, 8).requires_grad_()
    module(x).square().sum().backward()
    plain = [x.grad, *(p.grad for p in module.parameters())]
    assert all(a is not None and torch.equal(a, b) for a, b in zip(plain, recorded[1:], strict=True))


def test_memory_is_free_once_released_and_views_are_gone() -> None:
    x = torch.randn(SMALL_BYTES // 4).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        y = x.exp().exp().sum()
    views = shippable(store, 0)
    memory = [StorageWeakRef(view.untyped_storage()) for view in views]
    assert len(memory) == 2
    store.release(0)
    assert not any(storage.expired() for storage in memory)  # still under way
    del views
    assert all(storage.expired() for storage in memory)
    del y


def test_backward_before_loading_is_refused() -> None:
    x = torch.randn(4).requires_grad_()
    store = ActivationStore()
    with store.recording(0):
        y = x.exp().exp().sum()
    evict(store, 0)
    with pytest.raises(
        RuntimeError, match="at the partner stage or on the host: they must be loaded before their backward"
    ):
        y.backward()


def test_no_reference_cycles() -> None:
    """Memory that waits for the cycle collector is memory that is not there when it is needed."""
    gc.collect()
    gc.disable()
    try:
        torch.manual_seed(0)
        step(mlp(), away=True)
        x = torch.randn(4).requires_grad_()
        store = ActivationStore()
        with store.recording(0):
            y = x.exp().relu()
        store.attach(0, y)
        evict(store, 0)
        freed = weakref.ref(store)
        del x, y, store
        assert freed() is None
    finally:
        gc.enable()


MICRO_BATCHES = 4


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_order_of_evictions_and_loads_gives_the_same_gradients(data: st.DataObject) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh())
    mask = torch.ones(3, 4)
    inputs = [torch.randn(3, 4) for _ in range(MICRO_BATCHES)]

    def gradients(choose: Callable[[Sequence[str]], str] | None) -> list[Tensor]:
        module.zero_grad()
        store = ActivationStore(module.parameters())
        received, outputs, away = [], [], dict[int, list[Tensor]]()
        for key, values in enumerate(inputs):
            received.append(values.clone().requires_grad_())
            with store.recording(key):
                outputs.append((module(received[-1]) * mask).square().sum())
            store.attach(key, received[-1])
        sizes = [store.nbytes(key) for key in range(MICRO_BATCHES)]
        assert store.counter.own_bytes == sum(sizes)
        remaining = list(range(MICRO_BATCHES))
        while (
            choose is not None
            and (move := choose(["stop", *(f"E{i}" for i in remaining), *(f"B{i}" for i in remaining)])) != "stop"
        ):
            key = int(move[1:])
            if key in away:
                load(store, key, away.pop(key))
            elif move[0] == "E":
                away[key] = evict(store, key)
            if move[0] == "B":
                outputs[key].backward()
                remaining.remove(key)
            gone = sum(copy.numel() for copies in away.values() for copy in copies)
            kept = mask.nbytes if remaining else 0
            assert (
                store.counter.own_bytes
                == sum(sizes[i] - (mask.nbytes if i == 0 else 0) for i in remaining) + kept - gone
            )
            assert store.counter.own_units == len(remaining) - len(away)
        for key in remaining:
            if key in away:
                load(store, key, away.pop(key))
            outputs[key].backward()
        store.assert_empty()
        return [x.grad for x in received if x.grad is not None]

    plain = gradients(None)
    shuffled = gradients(lambda moves: data.draw(st.sampled_from(moves)))
    assert len(plain) == MICRO_BATCHES
    assert all(torch.equal(a, b) for a, b in zip(plain, shuffled, strict=True))


def test_softmax_and_dropout_of_a_real_layer_leave_completely() -> None:
    """Everything that a transformer layer saved, but for its parameters, is exclusive: nothing is left on the stage."""
    torch.manual_seed(0)
    layer = transformer_layer()
    x = torch.randn(2, 3, 8).requires_grad_()
    store = ActivationStore(layer.parameters())
    with store.recording(0):
        y = layer(x)
    store.attach(0, x)
    y = F.mse_loss(y, torch.zeros(()).expand_as(y))
    evict(store, 0)
    assert store.counter.own_bytes == 0
    del y


def test_a_micro_batch_comes_back_into_the_memory_of_one_that_leaves() -> None:
    model, store = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), ActivationStore(device="cpu")
    inputs = [torch.randn(4, 8) for _ in range(2)]
    outputs = []
    for key, given_to_it in enumerate(inputs):
        with store.recording(key):
            outputs.append(model(given_to_it).square().sum())
        if key == 0:
            first = evict(store, 0)
    second = [view.clone() for view in shippable(store, 1)]
    vacated = store.release(1)
    addresses = {storage.data_ptr() for storage in vacated}
    views = store.refill(0, vacated)
    assert {view.untyped_storage().data_ptr() for view in views} == addresses
    for view, copy in zip(views, first, strict=True):
        view.copy_(copy)
    store.unpack(0)
    del vacated, views
    outputs[0].backward()
    load(store, 1, second)
    outputs[1].backward()
    found = [parameter.grad for parameter in model.parameters()]
    loss = sum(model(given_to_it).square().sum() for given_to_it in inputs)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.allclose(mine, plain) for mine, plain in zip(found, expected, strict=True))
    assert store.counter.own_bytes == 0


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


def test_what_is_packed_is_free_at_once_and_what_travels_alone_is_not_copied() -> None:
    store = ActivationStore()
    alone, memory = chain(store, [SMALL])
    message = store.ship(0)
    assert not memory[0].expired()
    del message, alone
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
