"""PACI (arXiv 2606.07881) in plain torch: losses and weights are those of its rule in one process, bit for bit.

The rule has no schedule. On stage s the first p − 1 − s micro-batches of a batch are forwarded before the stage has
made the step of the batch before: on W(t−1). The others are forwarded on W(t), and all are backwarded on W(t). Where a
run drains (it saves, or evaluates), nothing has been forwarded ahead.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenpipe.train import data
from evenpipe.train.launch import run_cases
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.plain import learning_rate, loss_of, make_optimizer
from evenpipe.train.result import RunResult
from evenpipe.train.run import digest
from evenpipe.train.transformer import initialised_piece, pieces_of

MODEL: dict[str, Any] = {
    "engine": "module",
    "schedule": "paci",
    "layers": 4,
    "hidden": 32,
    "seq_length": 32,
    "stages": 4,
    "micro_batches": 5,
    "iterations": 8,
    "lr": 0.01,
    "lr_warmup": 2,
    "lr_decay": "cosine",
}
CASES: dict[str, dict[str, Any]] = {
    "p=4": {},
    "p=4, m=p, BPipe": {"micro_batches": 4, "bpipe": True},
    "p=2": {"stages": 2, "micro_batches": 3},
    "p=2, SGD": {"stages": 2, "micro_batches": 2, "optimizer": "sgd", "momentum": 0.9, "lr": 0.1},
    "p=2, Muon": {"stages": 2, "optimizer": "muon"},
    "p=2, two replicas": {"stages": 2, "data_parallel": 2},
    "p=4, bf16": {"precision": "bf16"},
}


def options_of(**changes: Any) -> TrainOptions:
    return TrainOptions.of(**MODEL | changes)


@pytest.fixture(scope="module")
def results() -> dict[str, RunResult]:
    return dict(zip(CASES, run_cases([options_of(**case) for case in CASES.values()]), strict=True))


def fill(modules: Sequence[nn.Module], values: Sequence[nn.Module]) -> None:
    """Write weights in place as an optimizer does, unseen by the check of autograd: what is saved of them changes."""
    for module, value in zip(modules, values, strict=True):
        for parameter, new in zip(module.parameters(), value.parameters(), strict=True):
            parameter.data.copy_(new.data)


def train_in_one_process(options: TrainOptions, drains: Sequence[int] = ()) -> tuple[tuple[float, ...], str]:
    """Train by the rule; before the batches in `drains` the pipeline was empty."""
    corpus, stages = data.load(options), options.stages
    pieces = [initialised_piece(options, corpus.vocabulary, number) for number in range(options.layers + 2)]
    parameters = [one for piece in pieces for one in piece.parameters()]
    ends = [one for piece in (pieces[0], pieces[-1]) for one in piece.parameters()]
    optimizer = make_optimizer(options, parameters, ends)
    stage_of = {number: stage for stage in range(stages) for number in pieces_of(options, stage, stages)}
    before, losses = copy.deepcopy(pieces), []
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    for iteration in range(options.iterations):
        present = copy.deepcopy(pieces)
        of_replicas, sums = [], [torch.zeros_like(one) for one in parameters]
        for replica in range(options.data_parallel):
            found = []
            for one in parameters:
                one.grad = None
            for number, batch in enumerate(corpus.micro_batches(iteration, replica)):
                for place, piece in enumerate(pieces):
                    early = iteration not in (0, *drains) and number < stages - 1 - stage_of[place]
                    fill([piece], [before[place] if early else present[place]])
                value, *target = map(torch.from_numpy, batch)
                for piece in pieces:
                    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                        value = piece(value).to(dtype)
                loss = loss_of(value, target)
                fill(pieces, present)
                (loss / options.micro_batches).backward()
                found.append(loss.item())
            of_replicas.append(sum(found) / len(found))
            for total, one in zip(sums, parameters, strict=True):
                total += one.grad
        for total, one in zip(sums, parameters, strict=True):
            one.grad = total / options.data_parallel
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, iteration)
        optimizer.step()
        before = present
        losses.append(sum(of_replicas) / len(of_replicas))
    return tuple(losses), hashlib.sha256("".join(digest([piece]) for piece in pieces).encode()).hexdigest()


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_the_rule(results: dict[str, RunResult], name: str) -> None:
    options, result = options_of(**CASES[name]), results[name]
    assert (result.losses, result.weights_sha256) == train_in_one_process(options)
    assert result.losses[-1] < result.losses[0]
    assert result.weight_versions_peak == 1
    assert [stage.weight_version_bytes for stage in result.stages] == [0] * options.stages
    assert [stage.peak_live for stage in result.stages] == list(options.plan.peak_live)


def test_drift_changes_the_training(results: dict[str, RunResult]) -> None:
    drained = range(MODEL["iterations"])
    assert results["p=4"].weights_sha256 != train_in_one_process(options_of(), list(drained))[1]


def test_a_run_that_is_saved_and_gone_on_with_is_the_rule_with_a_drain(tmp_path: Path) -> None:
    [whole] = run_cases([options_of(save=str(tmp_path), save_interval=3)])
    [rest] = run_cases([options_of(load=str(tmp_path / "iter_0000003"))])
    losses, weights = train_in_one_process(options_of(), drains=[3, 6])
    assert (whole.losses, whole.weights_sha256) == (losses, weights)
    # From a checkpoint on it drains once less, where the first run had saved again.
    assert rest.losses[:3] == losses[3:6]
    [other] = run_cases([options_of(load=str(tmp_path / "iter_0000003"), save=str(tmp_path / "2"), save_interval=3)])
    assert (other.losses, other.weights_sha256) == (losses[3:], weights)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clip_grad": 1.0}, "--clip-grad 1: the norm is of all stages' gradients, and under --schedule paci a stage"),
        ({"micro_batches": 3}, "--micro-batches 3: a run under paci needs at least as many as there are stages"),
        ({"delay_correction": "nesterov"}, "--delay-correction nesterov: only --schedule 2bw has gradients"),
        ({"engine": "evenpipe"}, "--schedule paci: the step of a tied embedding would wait .*: add --untie-embeddings"),
        ({"engine": "evenpipe", "untie_embeddings": True, "precision": "fp16"}, "--precision fp16: under "),
    ],
)
def test_what_it_has_not_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionsError, match=said) as caught:
        options_of(**changes)
    assert "\n" not in str(caught.value)
