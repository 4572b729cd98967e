"""Tensors that consist of plain ones are counted, moved and put together again like these."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evenpipe.runtime.recompute_swap import Keeper, Keeping
from evenpipe.runtime.store import ActivationStore

sys.path.insert(0, str(Path(__file__).parent))
from compositions import Flattened, Opaque, Product, Quantized, _Cast
from stores import evict, load

ROWS, WIDTH = 8, 16
BYTES = ROWS * WIDTH + 4  # a byte each, and the scale

pytestmark = pytest.mark.parametrize("kind", [Flattened, Quantized])


def leaves() -> tuple[Tensor, nn.Parameter]:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, requires_grad=True), nn.Parameter(torch.randn(WIDTH))


def gradients(kind: type[_Cast]) -> list[Tensor | None]:
    value, weight = leaves()
    Product.apply(value, weight, kind).square().sum().backward()
    return [value.grad, weight.grad]


def same(found: list[Tensor | None], kind: type[_Cast]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, gradients(kind), strict=True))  # type: ignore[arg-type]


def test_its_parts_are_counted_leave_and_come_back(kind: type[_Cast]) -> None:
    value, weight = leaves()
    store = ActivationStore([weight])
    with store.recording(0):
        output = Product.apply(value, weight, kind).square().sum()
    assert store.nbytes(0) == store.counter.own_bytes == BYTES + 4 * ROWS * WIDTH  # what square saves, too
    assert not store.lasting_bytes
    copies = evict(store, 0)
    assert sum(copy.numel() for copy in copies) == BYTES + 4 * ROWS * WIDTH
    assert store.counter.own_bytes == 0
    with pytest.raises(RuntimeError, match="at the partner stage"):
        output.backward()
    value, weight = leaves()
    store = ActivationStore([weight])
    with store.recording(0):
        output = Product.apply(value, weight, kind).square().sum()
    load(store, 0, evict(store, 0))
    output.backward()
    store.assert_empty()
    assert same([value.grad, weight.grad], kind)


def test_one_that_somebody_holds_is_counted_and_stays(kind: type[_Cast]) -> None:
    cast, factor = kind.of(torch.ones(ROWS, WIDTH)), torch.ones(ROWS, WIDTH, requires_grad=True)

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx, factor):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(cast)
            return factor * 2

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * ctx.saved_tensors[0].values()

    store = ActivationStore()
    with store.recording(0):
        output = Held.apply(factor)
    assert (store.nbytes(0), store.seal(0)) == (BYTES, ())
    output.sum().backward()
    assert factor.grad is not None
    assert torch.equal(factor.grad, torch.ones(ROWS, WIDTH))


def test_a_parameter_of_that_kind_comes_back_itself(kind: type[_Cast]) -> None:
    weight, factor = nn.Parameter(kind.of(torch.ones(ROWS, WIDTH)), requires_grad=False), leaves()[0]
    found = list[Tensor]()

    class Uses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, factor):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(weight)
            return factor * 2

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            found.extend(ctx.saved_tensors)
            return gradient

    store = ActivationStore([weight])
    with store.recording(0):
        output = Uses.apply(factor)
    assert store.counter.own_bytes == 0
    assert not store.lasting_bytes
    output.sum().backward()
    assert found[0] is weight


def test_a_change_in_place_is_still_an_error(kind: type[_Cast]) -> None:
    casts = list[_Cast]()

    class Keeps(kind):  # type: ignore[misc]
        @classmethod
        def of(cls, tensor: Tensor) -> _Cast:
            casts.append(kind.of(tensor))
            return casts[0]

    value, weight = leaves()
    with ActivationStore([weight]).recording(0):
        output = Product.apply(value, weight, Keeps)
    casts[0]._data.add_(1)
    with pytest.raises(RuntimeError, match="modified in place before its backward"):
        output.sum().backward()


def test_what_a_planned_stage_swaps_or_computes_again_may_be_of_that_kind(kind: type[_Cast]) -> None:
    """An operation that saves one makes two storages more: the host has the large one meanwhile, or it is made anew."""
    made = {0: ((1, ROWS * WIDTH), (2, 4), (0, 4 * ROWS * WIDTH))}
    swaps = Keeping(swapped={1}, made=made, out={0: (1,)}, gone={0: (1,)}, early=(1,))
    again = Keeping(again={0}, dropped={1}, made=made)
    for keeping in (swaps, again):
        value, weight = leaves()
        store = ActivationStore([weight])
        keeper = Keeper(store, torch.device("cpu"))
        with store.recording(0), keeper.forward(0, keeping, lambda ordinal: nullcontext()) as keep:
            output = keep(0, Product.apply, value, weight, kind).square().sum()
        del keep
        held = 4 + 4 * ROWS * WIDTH + (4 * ROWS * WIDTH if keeping is again else 0)  # what runs again keeps its input
        assert store.counter.own_bytes == held
        keeper.swap_out(0)
        keeper.swap_in(0)
        output.backward()
        store.assert_empty()
        assert same([value.grad, weight.grad], kind)


def test_what_cannot_be_taken_apart_is_counted_by_type(kind: type[_Cast]) -> None:
    value, weight = leaves()
    store = ActivationStore([weight])
    for key in (0, 1):
        with store.recording(key):
            output = Product.apply(value, weight, Opaque)
        assert store.seal(key) == ()
    assert store.lasting_bytes == {"Opaque": BYTES}
    output.square().sum().backward()
    assert same([value.grad, weight.grad], kind)
