"""The engine "module": whatever the schedule, losses and weights are those of a loop in one process, bit for bit."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from evenpipe.torch.two_bw import scaled_to
from evenpipe.train import data
from evenpipe.train.launch import StageFailed, run_cases
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.plain import learning_rate, loss_of, make_optimizer, squares_of
from evenpipe.train.predict import predict
from evenpipe.train.result import RunResult
from evenpipe.train.run import digest
from evenpipe.train.transformer import initialised_piece
from tests.oracle.recurrence import TwoBWUpdates
from tests.rig.faults import Fault

MODEL: dict[str, Any] = {
    "engine": "module",
    "layers": 8,
    "hidden": 32,
    "seq_length": 32,
    "stages": 4,
    "micro_batches": 9,
    "iterations": 3,
    "clip_grad": 0.5,
    "lr_warmup": 1,
    "lr_decay": "cosine",
}
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "1f1b, BPipe": {"bpipe": True},
    "gpipe": {"schedule": "gpipe"},
    "2F2B, BPipe": {"schedule": "kfkb", "group_size": 2, "bpipe": True},
    "two stages of two replicas": {"stages": 2, "data_parallel": 2},
    "bf16": {"precision": "bf16"},
    "BERT, SGD": {"model": "bert", "optimizer": "sgd", "momentum": 0.9, "lr": 0.1},
    "zb-h1": {"schedule": "zb-h1"},
    "v-half": {"schedule": "v-half"},
    "bf16, zb-h1": {"precision": "bf16", "schedule": "zb-h1"},
    "interleaved": {"schedule": "interleaved", "chunks": 2, "micro_batches": 8},
    "one stage": {"stages": 1},
    "2bw": {"schedule": "2bw", "iterations": 4, "lr_warmup": 3},
    "muon": {"optimizer": "muon"},
    "2bw, muon": {"schedule": "2bw", "optimizer": "muon", "iterations": 4},
    "2bw, BPipe, SGD, unclipped": {
        "schedule": "2bw",
        "bpipe": True,
        "optimizer": "sgd",
        "momentum": 0.9,
        "lr": 0.1,
        "clip_grad": 0.0,
        "iterations": 4,
    },
    "2bw, two stages of two replicas": {"schedule": "2bw", "stages": 2, "data_parallel": 2, "iterations": 4},
}


def options_of(**changes: Any) -> TrainOptions:
    return TrainOptions.of(**MODEL | changes)


@pytest.fixture(scope="module")
def results() -> dict[str, RunResult]:
    return dict(zip(CASES, run_cases([options_of(**case) for case in CASES.values()]), strict=True))


def train_in_one_process(options: TrainOptions) -> tuple[tuple[float, ...], str]:
    """Plain PyTorch: every micro-batch through the whole model, one after the other; with delayed updates under 2bw."""
    corpus = data.load(options)
    newest = [initialised_piece(options, corpus.vocabulary, number) for number in range(options.layers + 2)]
    every, ends = ([one for piece in some for one in piece.parameters()] for some in (newest, (newest[0], newest[-1])))
    optimizer = make_optimizer(options, every, ends)
    pieces = copy.deepcopy(newest)
    parameters = [parameter for piece in pieces for parameter in piece.parameters()]
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradient_of = dict(
        zip((id(one) for piece in newest for one in piece.parameters()), range(len(parameters)), strict=True)
    )
    order = [gradient_of[id(one)] for one in stepped]
    updates = TwoBWUpdates(optimizer, 1 if options.streams else 0)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    losses = []
    for iteration in range(options.iterations):
        with torch.no_grad():
            for number, seen in zip(order, updates.seen, strict=True):
                parameters[number].copy_(seen)
        of_replicas, sums = [], [torch.zeros_like(parameter) for parameter in parameters]
        for replica in range(options.data_parallel):
            for parameter in parameters:
                parameter.grad = None
            found = []
            for batch in corpus.micro_batches(iteration, replica):
                value, *target = map(torch.from_numpy, batch)
                for piece in pieces:
                    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                        value = piece(value).to(dtype)
                loss = loss_of(value, target)
                (loss / options.micro_batches).backward()
                found.append(loss.item())
            of_replicas.append(sum(found) / len(found))
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.grad
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = total / options.data_parallel
        losses.append(sum(of_replicas) / len(of_replicas))
        norm = math.sqrt(sum(squares_of(piece).item() for piece in pieces))
        scaled_to(options.clip_grad, norm, [parameter.grad for parameter in parameters])
        updates.update([parameters[number].grad for number in order], learning_rate(options, iteration))
    return tuple(losses), hashlib.sha256("".join(digest([piece]) for piece in newest).encode()).hexdigest()


#: What says how the work is done, and not which.
_CUT = ("bpipe", "group_size", "chunks", "stages")


def rule_of(case: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What a loop in one process knows of a case."""
    return tuple(
        (key, value) for key, value in case.items() if key not in _CUT and (key != "schedule" or value == "2bw")
    )


@functools.cache
def trained_in_one_process(rule: tuple[tuple[str, Any], ...]) -> tuple[tuple[float, ...], str]:
    return train_in_one_process(options_of(**dict(rule)))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_a_loop_in_one_process(results: dict[str, RunResult], name: str) -> None:
    losses, weights = trained_in_one_process(rule_of(CASES[name]))
    assert results[name].losses == losses
    assert results[name].weights_sha256 == weights
    assert losses[-1] < losses[0]


def test_weights_do_not_depend_on_the_cut_or_the_schedule(results: dict[str, RunResult]) -> None:
    same = ["1f1b", "1f1b, BPipe", "gpipe", "2F2B, BPipe", "zb-h1", "v-half", "one stage"]
    assert len({(results[name].losses, results[name].weights_sha256) for name in same}) == 1
    assert len({result.weights_sha256 for name, result in results.items() if name.startswith("bf16")}) == 1
    assert results["bf16"].losses != results["1f1b"].losses


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_as_predicted(results: dict[str, RunResult], name: str) -> None:
    options, result = options_of(**CASES[name]), results[name]
    prediction = predict(options.program, result)
    assert [stage.peak_live for stage in result.stages] == [stage.peak_live for stage in prediction.stages]
    for found, predicted in zip(result.stages, prediction.stages, strict=True):
        assert 0.98 < found.peak_saved_bytes / predicted.peak_bytes < 1.02
    assert [stage.evicted_bytes > 0 for stage in result.stages] == [count > 0 for count in options.plan.evictions]


@pytest.mark.parametrize("name", ["bf16", "2bw"])
def test_a_run_that_is_saved_and_gone_on_with_is_the_run_that_was_not(
    results: dict[str, RunResult], tmp_path: Path, name: str
) -> None:
    changes = CASES[name]
    [whole] = run_cases([options_of(**changes, save=str(tmp_path), save_interval=2)])
    middle = str(tmp_path / "iter_0000002")
    [rest] = run_cases([options_of(**changes, load=middle)])
    assert rest.first_iteration == 2
    assert whole.losses == results[name].losses
    assert rest.losses == whole.losses[2:]
    assert rest.weights_sha256 == whole.weights_sha256 == results[name].weights_sha256
    if name == "bf16":
        with pytest.raises(OptionsError, match=r"other parts of the model on stage \d: use the --schedule"):
            run_cases([options_of(**changes, load=middle, schedule="v-half")])


def test_a_failure_names_stage_and_action() -> None:
    with Fault("1:B3").rehearsed(), pytest.raises(StageFailed, match="stage 1 failed at B3: RuntimeError: rehearsed"):
        run_cases([options_of()])
    told = "stage 3 failed at F2: FloatingPointError: loss is nan in iteration 2"
    with Fault("1:F2", "nan").rehearsed(), pytest.raises(StageFailed, match=told):
        run_cases([options_of()])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel 2: --engine module has none"),
        ({"dropout": 0.1}, "--dropout 0.1: --engine module has none"),
        ({"precision": "fp16"}, "--precision fp16: --engine module has none"),
        ({"recompute": "full"}, "--recompute full: --engine module has none"),
        ({"distributed_optimizer": True}, "--distributed-optimizer: --engine module has none"),
        ({"overlap_grad_reduce": True}, "--overlap-grad-reduce: --engine module has none"),
        ({"schedule": "kfkb", "group_size": "auto", "memory_gib": 1}, "--group-size auto: --engine module"),
    ],
)
def test_what_it_has_not_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionsError, match=said) as caught:
        options_of(**changes)
    assert "\n" not in str(caught.value)
