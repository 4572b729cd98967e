"""2BW with experts that balance whole batches: counts are a batch's, biases a version's, by the rule of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest

from evenpipe.train import process
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult
from tests.oracle.process import Case, Trained, train_cases
from tests.selected import selected

_SMALL = {"hidden": 16, "heads": 2, "seq_length": 32, "iterations": 5, "schedule": "2bw", "experts": 4, "lr": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "p=2, m=3": {"stages": 2, "micro_batches": 3},
    "p=4, m=4, BPipe": {"stages": 4, "micro_batches": 4, "bpipe": True, "optimizer": "sgd", "lr": 0.3},
    "p=2, m=2, recomputed": {"stages": 2, "micro_batches": 2, "recompute": "full", "clip_grad": 0.0},
    "p=2, m=2, weight prediction": {"stages": 2, "micro_batches": 2, "delay_correction": "weight-prediction"},
    "p=2, m=3, paci": {
        "stages": 2,
        "micro_batches": 3,
        "schedule": "paci",
        "untie_embeddings": True,
        "clip_grad": 0.0,
    },
    "DP2 x PP2": {"stages": 2, "micro_batches": 2, "data_parallel": 2},
}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
BIASED |= {"moe_router_bias_update_rate": 0.05}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3}


def options_of(name: str) -> TrainOptions:
    return TrainOptions.of(**{**_SMALL, "layers": CASES[name]["stages"], **CASES[name]})


def settings_of(name: str) -> dict[str, Any]:
    """Replicas count a micro-batch's tokens together, which one process after the other cannot."""
    return BIASED if "DP2" in name else BIASED | GLOBAL


@contextmanager
def balanced(owner: Any) -> Iterator[None]:
    """Inside, `owner` configures models whose routers balance whole batches; what counts tokens is not compiled."""
    import torch

    make: Callable[..., Any] = owner._config

    def made(options: TrainOptions, *rest: Any) -> Any:
        [name] = [name for name in CASES if options_of(name) == options]
        return dataclasses.replace(make(options, *rest), **settings_of(name))

    with torch.compiler.set_stance("force_eager"), mock.patch.object(owner, "_config", made):
        yield


def of_the_oracle() -> AbstractContextManager[None]:
    from tests.oracle import stages

    return balanced(stages)


class Balanced:
    """Stands for `evenpipe.train.process.train_cases` in each process of a run."""

    def __call__(self, cases: Any, *rest: Any) -> Any:
        from evenpipe.megatron.train_engine import learner
        from evenpipe.train.process import train_cases

        with balanced(learner):
            return train_cases(cases, *rest)


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    return sorted(selected(request, "name"), key=lambda name: options_of(name).world_size)


@pytest.fixture(scope="module")
def runs(names: list[str]) -> dict[str, RunResult]:
    with mock.patch.object(process, "train_cases", Balanced()):
        return dict(zip(names, run_cases([options_of(name) for name in names]), strict=True))


@pytest.fixture(scope="module")
def oracles(names: list[str]) -> dict[tuple[str, int], Trained]:
    asked = [(name, delay) for name in names for delay in (0, 1)]
    found = train_cases([Case(options_of(name), delay) for name, delay in asked], of_the_oracle)
    return dict(zip(asked, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_routers_balance_a_batch_late(
    runs: dict[str, RunResult], oracles: dict[tuple[str, int], Trained], name: str
) -> None:
    """Under paci the first micro-batches of a batch are, and the bias that has been moved routes the others."""
    delay = int("paci" not in name)
    run, oracle = runs[name], oracles[name, delay]
    assert run.losses == oracle.losses
    assert run.weights_sha256 == oracle.weights_sha256
    assert run.losses != oracles[name, 1 - delay].losses
