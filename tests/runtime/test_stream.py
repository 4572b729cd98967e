"""Streams without flushes train as the rule of PipeDream-2BW says, to the last bit, also when they are broken off."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from executor_cases import chunk_module, loss, reference, sample
from stream_cases import BATCHES, CASES, WORLD, Case

from tests.reports import reports

SCRIPT = Path(__file__).with_name("stream_cases.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote down."""
    folder = tmp_path_factory.mktemp("stream")
    return reports(SCRIPT, folder, WORLD)


def by_the_rule(case: Case) -> tuple[list[list[str]], list[list[str]]]:
    """Losses by batch and final weights by stage of W(t+1) = Adam(W(t), ∇f(W(t−1))), in one process, in copies."""
    modules = [chunk_module(place) for place in range(case.stages)]
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.01, foreach=False) for module in modules]
    history = [[[p.detach().clone() for p in module.parameters()] for module in modules]]
    losses = []
    for batch in range(BATCHES):
        older = [chunk_module(place) for place in range(case.stages)]
        for module, weights in zip(older, history[max(batch - 1, 0)], strict=True):
            for parameter, weight in zip(module.parameters(), weights, strict=True):
                parameter.data.copy_(weight)
        losses.append([])
        for number in range(batch * case.micro_batches, (batch + 1) * case.micro_batches):
            handed = sample(number)
            ends = []
            for module in older:
                taken = handed.detach().requires_grad_()
                handed = module(taken)
                ends.append((taken, handed))
            value = loss(number, handed)
            losses[-1].append(value.item().hex())
            gradient = torch.autograd.grad(value, handed, retain_graph=True)[0]
            for taken, output in reversed(ends):
                output.backward(gradient)
                assert taken.grad is not None
                gradient = taken.grad
        for module, old, optimizer in zip(modules, older, optimizers, strict=True):
            for parameter, read in zip(module.parameters(), old.parameters(), strict=True):
                parameter.grad = read.grad
            optimizer.step()
        history.append([[p.detach().clone() for p in module.parameters()] for module in modules])
    return losses, [[v.hex() for p in module.parameters() for v in p.flatten().tolist()] for module in modules]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_follow_the_rule(ranks: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    losses, weights = by_the_rule(case)
    assert ranks[case.stages - 1]["cases"][name]["losses"] == losses
    assert [ranks[stage]["cases"][name]["weights"] for stage in range(case.stages)] == weights


@pytest.mark.parametrize("name", CASES)
def test_memory_is_bounded_and_nothing_is_left(ranks: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    found = [ranks[stage]["cases"][name] for stage in range(case.stages)]
    bound = -(-(case.stages + 2) // 2)
    for stage, one in enumerate(found):
        assert one["peak_units"] <= (bound if case.bpipe else case.stages - stage)
        assert one["left"] == [0, 0, 0, 0]
        assert one["versions"] == 2


def test_exchanges_bring_every_row_to_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["exchanges"] == [[[float(other), 10.0 * turn] for other in range(WORLD)] for turn in range(2)]


def test_stages_that_synchronise_come_to_an_end_and_with_receives_posted_ahead_they_do_not(tmp_path):
    """1F1B on two stages: F1 on stage 0 waits for B0's gradient, which waits for stage 1 to wait for F1's output."""
    found = reports(SCRIPT.with_name("synchronised_cases.py"), tmp_path, 2)
    losses, _ = reference(2, 4, "dense")
    assert [ours for ours, _ in found] == [[], losses]
    assert all("Timed out" in ahead or "Connection closed" in ahead for _, ahead in found), found
