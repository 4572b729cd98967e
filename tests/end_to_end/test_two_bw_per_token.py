"""2BW with `calculate_per_token_loss` and `overlap_param_gather` trains by the rule of one process.

A batch's tokens divide its gradients, one batch later. Weights are gathered into the version that is next.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest

from evenpipe.train import process
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult
from tests.oracle.process import Case, Trained, train_cases
from tests.selected import selected

# Lengths vary, so that no two batches have the same number of tokens.
_SMALL = {"hidden": 16, "heads": 2, "seq_length": 32, "min_length": 4, "iterations": 5, "schedule": "2bw"}
_FREE = {"untie_embeddings": True, "clip_grad": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "p=2, m=3, Adam, nothing else waits": {**_FREE, "stages": 2, "micro_batches": 3, "lr": 0.01},
    "p=4, m=4, SGD, tied, BPipe": {
        "stages": 4,
        "micro_batches": 4,
        "optimizer": "sgd",
        "lr": 0.3,
        "bpipe": True,
        "clip_grad": 0.0,
    },
    "p=2, m=2, SGD, clipped": {"stages": 2, "micro_batches": 2, "optimizer": "sgd", "lr": 0.3},
    "DP2 x PP2, Adam, distributed, clipped": {
        "stages": 2,
        "data_parallel": 2,
        "micro_batches": 3,
        "lr": 0.001,
        "distributed_optimizer": True,
    },
}
_GATHERED = {"data_parallel": 2, "distributed_optimizer": True, "lr": 0.001}
CASES |= {
    "DP2 x PP2, gathered beside a backward": {**_FREE, **_GATHERED, "stages": 2, "micro_batches": 2},
    "DP2 x PP2, gathered, prediction": {
        **_FREE,
        **_GATHERED,
        "stages": 2,
        "micro_batches": 3,
        "delay_correction": "weight-prediction",
    },
}


def options_of(name: str) -> TrainOptions:
    return TrainOptions.of(**_SMALL, layers=CASES[name]["stages"], **CASES[name])


class PerToken:
    """Stands for `evenpipe.train.process.train_cases` in each process of a run."""

    def __call__(self, cases: Any, *rest: Any) -> Any:
        from evenpipe.megatron.train_engine import learner
        from evenpipe.train.process import train_cases

        make = learner._config

        def made(*given: Any) -> Any:
            return dataclasses.replace(make(*given), calculate_per_token_loss=True)

        wrapped = learner.DistributedDataParallelConfig

        def gathering(**given: Any) -> Any:
            return wrapped(**given, overlap_param_gather=given["use_distributed_optimizer"])

        with (
            mock.patch.object(learner, "_config", made),
            mock.patch.object(learner, "DistributedDataParallelConfig", gathering),
        ):
            return train_cases(cases, *rest)


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    return sorted(selected(request, "name"), key=lambda name: options_of(name).world_size)


@pytest.fixture(scope="module")
def runs(names: list[str]) -> dict[str, RunResult]:
    with mock.patch.object(process, "train_cases", PerToken()):
        return dict(zip(names, run_cases([options_of(name) for name in names]), strict=True))


@pytest.fixture(scope="module")
def oracles(names: list[str]) -> dict[str, Trained]:
    return dict(zip(names, train_cases([Case(options_of(name), 1, per_token=True) for name in names]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_divided_by_its_own_tokens(
    runs: dict[str, RunResult], oracles: dict[str, Trained], name: str
) -> None:
    run, oracle = runs[name], oracles[name]
    assert run.losses == pytest.approx(oracle.losses, rel=1e-6)
    assert run.grad_norms == pytest.approx(oracle.grad_norms, rel=1e-6)
    if "clipped" in name:  # the norm is divided, where the oracle takes that of divided gradients
        assert max(oracle.grad_norms) > 1
    else:
        assert run.losses == oracle.losses
        assert run.weights_sha256 == oracle.weights_sha256
