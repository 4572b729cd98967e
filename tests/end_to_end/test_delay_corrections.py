"""Corrections of 2BW's delay: pipelines train by the rule of one process, whose gradients are taken a step ahead."""

from typing import Any

import pytest
import torch

from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult
from tests.oracle.process import Case, Trained, train_cases
from tests.oracle.recurrence import TwoBWUpdates, descend
from tests.selected import selected

_SMALL = {"hidden": 16, "heads": 2, "seq_length": 16, "iterations": 6, "schedule": "2bw", "lr": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "p=2, weight-prediction": {"stages": 2, "micro_batches": 3, "lr_decay": "cosine"},
    "p=2, nesterov": {"stages": 2, "micro_batches": 2, "optimizer": "sgd", "momentum": 0.9, "lr": 0.1},
    "p=4, nesterov": {"stages": 4, "micro_batches": 5, "bpipe": True},
    "p=4, weight-prediction": {"stages": 4, "micro_batches": 4, "untie_embeddings": True, "clip_grad": 0.0},
    "p=2, error-feedback": {"stages": 2, "micro_batches": 2},
    "p=4, error-feedback": {"stages": 4, "micro_batches": 4},
    "DP2 x PP2, error-feedback": {
        "stages": 2,
        "data_parallel": 2,
        "micro_batches": 2,
        "distributed_optimizer": True,
        "clip_grad": 0.0,
    },
}


def options_of(name: str) -> TrainOptions:
    case = CASES[name]
    return TrainOptions.of(**{**_SMALL, "layers": case["stages"], **case}, delay_correction=name.partition(", ")[2])


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    return sorted(selected(request, "name"), key=lambda name: options_of(name).world_size)


@pytest.fixture(scope="module")
def runs(names: list[str]) -> dict[str, RunResult]:
    return dict(zip(names, run_cases([options_of(name) for name in names]), strict=True))


@pytest.fixture(scope="module")
def oracles(names: list[str]) -> dict[str, Trained]:
    return dict(zip(names, train_cases([Case(options_of(name), 1) for name in names]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_taken_ahead(runs: dict[str, RunResult], oracles: dict[str, Trained], name: str) -> None:
    assert runs[name].losses == oracles[name].losses
    assert runs[name].weights_sha256 == oracles[name].weights_sha256


RATES = [0.1, 0.2, 0.3, 0.25, 0.15, 0.05]


def test_error_feedback_is_prediction_seen_from_where_gradients_are_taken() -> None:
    """V(t+1) = V(t) - s(t) - (s(t) - s(t-1)), on a parabola of curvature 0.7."""
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    updates = TwoBWUpdates(torch.optim.SGD([weight], lr=1.0), 1, ahead=1.0)
    descend(updates, lambda batch, weights: [0.7 * weights[0]], RATES)
    trained, steps = [2.0], [0.0]
    for batch, rate in enumerate(RATES):
        steps.append(rate * 0.7 * trained[max(batch - 1, 0)])
        trained.append(trained[batch] - steps[-1] - (steps[-1] - steps[-2]))
    assert updates.foremost[0].item() == pytest.approx(trained[-1], rel=1e-12)


@pytest.mark.parametrize(
    ("momentum", "ahead", "stable"), [(0.0, 0.0, 1.0), (0.0, 1.0, 0.618), (0.9, 0.0, 1.0), (0.9, 1.0, 2.70)]
)
def test_the_largest_stable_rate_on_a_parabola(momentum: float, ahead: float, stable: float) -> None:
    """In units of the curvature's inverse, as docs/2bw.md has it: with momentum, looking ahead allows larger ones."""
    for rate, grows in ((0.97 * stable, False), (1.03 * stable, True)):
        weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum, dampening=momentum)
        updates = TwoBWUpdates(optimizer, 1, ahead=ahead)
        (last,) = descend(updates, lambda batch, weights: [weights[0]], [rate] * 2000)
        assert (abs(last.item()) > 1) == grows, rate
