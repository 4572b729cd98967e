"""2BW says which weights gradients are taken at, and any optimizer steps with them: by the rule of one process."""

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core.optimizer.layer_wise_optimizer")

from evenpipe.train import process
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult
from tests.end_to_end.optimizers import RATES, Optimizers, in_place_of_adamw
from tests.oracle.process import Case, Trained, train_cases
from tests.selected import selected

_SMALL = {"hidden": 16, "heads": 2, "seq_length": 16, "iterations": 12, "schedule": "2bw", "lr_decay": "cosine"}
CASES: dict[str, dict[str, Any]] = {
    "p=2, Lion": {"stages": 2, "micro_batches": 3},
    "p=2, LARS": {"stages": 2, "micro_batches": 2, "untie_embeddings": True},
    "p=2, RMSprop": {"stages": 2, "micro_batches": 2},
    "p=2, Muon": {"stages": 2, "micro_batches": 2},
    "p=4, Muon": {"stages": 4, "micro_batches": 5, "bpipe": True},
    "p=4, Adafactor": {"stages": 4, "micro_batches": 4, "clip_grad": 0.0},
    "DP2 x PP2, Muon, layer-wise": {"stages": 2, "micro_batches": 2, "data_parallel": 2, "clip_grad": 0.0},
}


def options_of(name: str) -> TrainOptions:
    case = CASES[name]
    return TrainOptions.of(**_SMALL, layers=case["stages"], lr=RATES[name.partition(", ")[2]], **case)


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    return sorted(selected(request, "name"), key=lambda name: options_of(name).world_size)


@pytest.fixture(scope="module")
def runs(names: list[str]) -> dict[str, RunResult]:
    with mock.patch.object(process, "train_cases", Optimizers()):
        return dict(zip(names, run_cases([options_of(name) for name in names]), strict=True))


@pytest.fixture(scope="module")
def oracles(names: list[str]) -> dict[str, Trained]:
    cases = [Case(options_of(name), 1) for name in names]
    return dict(zip(names, train_cases(cases, in_place_of_adamw), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_any_optimizer_steps_a_batch_late(runs: dict[str, RunResult], oracles: dict[str, Trained], name: str) -> None:
    run, oracle = runs[name], oracles[name]
    assert run.losses[-1] < run.losses[0]
    assert run.losses == oracle.losses
    assert run.weights_sha256 == oracle.weights_sha256
    # Layer-wise, each replica adds up the squares of its own parameters.
    assert run.grad_norms == pytest.approx(oracle.grad_norms, rel=1e-6)
