"""2BW with several instances of the distributed optimizer: replicas share its state out in groups, and train alike."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import pytest

from evenpipe.train import process
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult
from tests.oracle.process import Case, Trained, train_cases
from tests.selected import marked, selected

_SMALL = {"hidden": 16, "heads": 2, "seq_length": 16, "iterations": 5, "schedule": "2bw", "lr": 0.01, "layers": 2}
_INSTANCES = {**_SMALL, "stages": 2, "distributed_optimizer": True, "clip_grad": 0.0, "micro_batches": 2}
_OVERLAPPED = {"overlap_grad_reduce": True}
#: Of two instances.
CASES: dict[str, dict[str, Any]] = {
    "DP2": {**_INSTANCES, "data_parallel": 2},
    "DP2, overlapped, untied": {**_INSTANCES, **_OVERLAPPED, "data_parallel": 2, "untie_embeddings": True},
    "DP4, overlapped": {**_INSTANCES, **_OVERLAPPED, "data_parallel": 4},
}


class TwoInstances:
    """Stands for `evenpipe.train.process.train_cases` in each process of a run.

    Gradients are sums over tokens: a second reduction of a mean over replicas could be one without effect.
    """

    def __call__(self, cases: Any, *rest: Any) -> Any:
        from megatron.core import parallel_state

        from evenpipe.megatron.train_engine import learner
        from evenpipe.train.process import train_cases

        given = {"num_distributed_optimizer_instances": 2}
        initialize = partial(parallel_state.initialize_model_parallel, **given)
        config = partial(learner.DistributedDataParallelConfig, **given)
        make = learner._config

        def made(*args: Any) -> Any:
            return dataclasses.replace(make(*args), calculate_per_token_loss=True)

        with (
            mock.patch.object(parallel_state, "initialize_model_parallel", initialize),
            mock.patch.object(learner, "DistributedDataParallelConfig", config),
            mock.patch.object(learner, "_config", made),
        ):
            return train_cases(cases, *rest)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, tuple[RunResult, Trained]]:
    """The runs that are looked at, and what one process finds."""
    options = {name: TrainOptions.of(**CASES[name]) for name in CASES if name in selected(request, "name")}
    with mock.patch.object(process, "train_cases", TwoInstances()):
        runs = run_cases(list(options.values()))
    found = train_cases([Case(one, 1, per_token=True) for one in options.values()])
    return dict(zip(options, zip(runs, found, strict=True), strict=True))


@pytest.mark.parametrize("name", marked(CASES, ["DP4, overlapped"]))
def test_instances_step_as_one_process(name: str, trained: dict[str, tuple[RunResult, Trained]]) -> None:
    options, (run, one) = TrainOptions.of(**CASES[name]), trained[name]
    assert run.grad_norms == pytest.approx(one.grad_norms, rel=1e-6)
    if options.data_parallel == 2:  # four are added up in another order
        assert (run.losses, run.weights_sha256) == (one.losses, one.weights_sha256)
    assert run.losses == pytest.approx(one.losses, rel=1e-6)
