"""Operations that run again for what they have made."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from evenpipe.runtime.recompute_swap import Keeper, Keeping, KeepingCaller
from evenpipe.runtime.store import ActivationStore

aten = torch.ops.aten


def kept(nodes: int, nbytes: int) -> tuple[ActivationStore, Keeper, Keeping]:
    """Of so many nodes, each of which makes one storage, all are computed again."""
    store = ActivationStore()
    every = frozenset(range(nodes))
    return store, Keeper(store, torch.device("cpu")), Keeping(every, every, made={n: ((n, nbytes),) for n in every})


def chained(keep: KeepingCaller, hidden: Tensor, nodes: int) -> Tensor:
    for node in range(nodes):
        hidden = keep(node, aten.tanh.default, hidden)
    return hidden


def test_a_chain_longer_than_pythons_stack_runs_again() -> None:
    nodes, start = 400, torch.randn(16, dtype=torch.float64, requires_grad=True)
    store, keeper, keeping = kept(nodes, start.nbytes)
    with store.recording(0), keeper.forward(0, keeping, lambda ordinal: nullcontext()) as keep:
        last = chained(keep, start, nodes)
    assert store.nbytes(0) <= start.nbytes
    last.sum().backward()
    plain = start.detach().clone().requires_grad_()
    hidden = plain
    for _ in range(nodes):
        hidden = hidden.tanh()
    hidden.sum().backward()
    assert start.grad is not None
    assert torch.equal(start.grad, plain.grad)


def test_a_conjugate_view_of_what_is_computed_again_is_refused() -> None:
    start = torch.randn(16, dtype=torch.complex64, requires_grad=True)
    store, keeper, keeping = kept(1, start.nbytes)
    with store.recording(0), keeper.forward(0, keeping, lambda ordinal: nullcontext()) as keep:
        made = chained(keep, start, 1)
        with pytest.raises(RuntimeError, match="a conjugate or negative view"):
            made * made.conj()
