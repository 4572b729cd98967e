"""The checker of races reports accesses without an order, and only those: on work as small as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from evenpipe.runtime import streams
from tests.rig.checked import checking
from tests.rig.clocks import Device
from tests.rig.races import Memory

HOST = torch.device("cpu")


@pytest.fixture
def memory() -> Iterator[Memory]:
    with checking(Memory(Device())) as memory:
        yield memory


def kinds(memory: Memory) -> list[str]:
    return sorted({line.split()[0] for line in memory.races})


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("work", "kind"), [(torch.sum, "READ"), (torch.Tensor.zero_, "WRITE")])
def test_another_stream_has_to_wait(memory: Memory, work: Callable[..., object], kind: str, waits: bool) -> None:
    value, side = torch.ones(100) * 2, streams.opened(HOST)
    if waits:
        side.wait_stream(streams.current(HOST))
    with streams.on(side):
        work(value)
    assert kinds(memory) == ([] if waits else [kind])


def test_a_write_has_to_wait_for_reads_of_the_same_bytes(memory: Memory) -> None:
    value, side = torch.ones(100) * 2, streams.opened(HOST)
    side.wait_stream(streams.current(HOST))
    with streams.on(side):
        value[:50].sum()
    value[:50].sum()
    value[50:].zero_()
    assert kinds(memory) == []
    value[49:].zero_()
    assert kinds(memory) == ["WRITE"]


def test_an_event_orders_what_came_before_it(memory: Memory) -> None:
    side = streams.opened(HOST)
    first = torch.ones(100) * 2
    event = streams.current(HOST).record_event()
    second = torch.ones(100) * 2
    side.wait_event(event)
    with streams.on(side):
        first.sum()
        assert kinds(memory) == []
        second.sum()
    assert kinds(memory) == ["READ"]


@pytest.mark.parametrize("waits", ["for nothing", "for the reader", "of the host"])
def test_free_memory_is_at_once_free_to_the_stream_that_allocated_it(memory: Memory, waits: str) -> None:
    value, side = torch.ones(100) * 2, streams.opened(HOST)
    side.wait_stream(streams.current(HOST))
    with streams.on(side):
        value.sum()
        done = side.record_event()
    del value
    if waits == "for the reader":
        streams.current(HOST).wait_event(done)
    if waits == "of the host":
        done.synchronize()
    with streams.on(streams.opened(HOST)):
        torch.ones(100)  # of another pool
    assert kinds(memory) == []
    torch.ones(100)
    assert kinds(memory) == (["REUSE"] if waits == "for nothing" else [])


def test_new_memory_may_be_what_others_have_used_on_its_stream(memory: Memory) -> None:
    torch.ones(100).sum()
    fresh, side = torch.empty(100), streams.opened(HOST)
    with streams.on(side):
        fresh.zero_()
    assert kinds(memory) == ["WRITE"]


def test_what_is_handed_out_is_not_a_number(memory: Memory) -> None:
    assert bool(torch.empty(100).isnan().all())


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_kept_until_its_copies_have_been_waited_for(memory: Memory, waits: bool) -> None:
    pinned, side = streams.pinned(HOST, 100), streams.opened(HOST)
    target = torch.empty(100, dtype=torch.uint8)
    side.wait_stream(streams.current(HOST))
    with streams.on(side):
        target.copy_(pinned, non_blocking=True)
    if waits:
        streams.current(HOST).wait_stream(side)
    del pinned
    torch.ones(1)
    assert kinds(memory) == ([] if waits else ["REUSE"])


def test_a_33rd_stream_is_the_first_again(memory: Memory) -> None:
    opened = [streams.opened(HOST) for _ in range(33)]
    assert len({id(stream) for stream in opened}) == 32
    value, _ = torch.ones(100) * 2, opened[0].wait_stream(streams.current(HOST))
    with streams.on(opened[32]):
        value.sum()
    assert kinds(memory) == []


@pytest.mark.parametrize("joins", [True, False])
def test_a_backward_runs_on_the_stream_of_its_forward_and_edges_wait(memory: Memory, joins: bool) -> None:
    """Gradients that pass from stream to stream are in order; what the forward read is, where it was in order there."""
    weight, side = torch.ones(100, requires_grad=True), streams.opened(HOST)
    value = weight * 2
    if joins:
        side.wait_stream(streams.current(HOST))
    with streams.on(side):
        result = value.square()
    streams.current(HOST).wait_stream(side)
    (result * 3).sum().backward()
    assert weight.grad is not None
    weight.grad.sum()
    assert kinds(memory) == ([] if joins else ["READ"])


def test_what_a_leafs_gradient_comes_of_is_waited_for_at_the_end_of_a_backward_only(memory: Memory) -> None:
    """Until then the default stream goes on, also into memory that the leaf's stream still reads."""
    weight, other, side = torch.ones(100, requires_grad=True), torch.ones(100, requires_grad=True), streams.opened(HOST)
    earlier, value = other * 3, torch.ones(100) * 2
    side.wait_stream(streams.current(HOST))
    with streams.on(side):
        result = value * weight
    streams.current(HOST).wait_stream(side)
    total = (result + earlier).sum()
    del value, result
    total.backward()
    assert kinds(memory) == ["REUSE"]
    assert weight.grad is not None
    weight.grad.sum()
    assert kinds(memory) == ["REUSE"]


def test_a_backward_leaves_the_current_stream_as_it_was(memory: Memory) -> None:
    side = streams.opened(HOST)
    with streams.on(side):
        (torch.ones(100, requires_grad=True) * 2).sum().backward()
        assert streams.current(HOST) is side
    assert kinds(memory) == []
