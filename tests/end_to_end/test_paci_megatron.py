"""PACI (arXiv 2606.07881) in Megatron: losses and weights are those of its rule in one process, bit for bit.

A batch's first p − 1 − s micro-batches on stage s are forwarded on W(t−1), the others on W(t); backwards are on W(t).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult
from tests.oracle.process import Case, Trained, train_cases

_SMALL = {"hidden": 16, "heads": 2, "seq_length": 16, "iterations": 5, "schedule": "paci", "lr": 0.01, "layers": 4}
_FREE = {**_SMALL, "untie_embeddings": True, "clip_grad": 0.0, "lr_warmup": 2, "lr_decay": "cosine"}
CASES: dict[str, dict[str, Any]] = {
    "p=2, Adam": {**_FREE, "stages": 2, "micro_batches": 3},
    "p=2, Adam, bf16, distributed": {
        **_FREE,
        "stages": 2,
        "micro_batches": 2,
        "precision": "bf16",
        "distributed_optimizer": True,
    },
    "p=4, SGD, BPipe": {**_FREE, "stages": 4, "micro_batches": 4, "bpipe": True, "optimizer": "sgd", "lr": 0.1},
    "p=2, Adam, experts": {**_FREE, "stages": 2, "micro_batches": 3, "experts": 4},
    "DP2 x PP2": {**_FREE, "stages": 2, "micro_batches": 3, "data_parallel": 2, "distributed_optimizer": True},
}
_SHARED_OUT = {**CASES["DP2 x PP2"], "experts": 4, "expert_parallel": 2}


def options_of(name: str) -> TrainOptions:
    return TrainOptions.of(**CASES[name])


@pytest.fixture(scope="module")
def runs() -> dict[str, RunResult]:
    return dict(zip(CASES, run_cases([options_of(name) for name in CASES]), strict=True))


@pytest.fixture(scope="module")
def oracles() -> dict[str, Trained]:
    return dict(zip(CASES, train_cases([Case(options_of(name), 0) for name in CASES]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_stages_step_by_themselves(runs: dict[str, RunResult], oracles: dict[str, Trained], name: str) -> None:
    run, oracle = runs[name], oracles[name]
    assert run.losses[-1] < run.losses[0]
    assert (run.losses, run.weights_sha256) == (oracle.losses, oracle.weights_sha256)
    assert run.weight_versions_peak == 1
    assert [stage.weight_version_bytes for stage in run.stages] == [0] * options_of(name).stages


def test_experts_that_are_shared_out_train_by_the_same_rule() -> None:
    """They add up the tokens of all replicas in another order."""
    options = TrainOptions.of(**_SHARED_OUT)
    [run], [oracle] = run_cases([options]), train_cases([Case(options, 0)])
    assert run.losses[-1] < run.losses[0]
    assert run.losses == pytest.approx(oracle.losses, rel=1e-5)


def test_a_resumed_run_goes_on_as_the_run_that_saved(tmp_path: Path) -> None:
    """Both drain where they save."""
    options = {**CASES["p=2, Adam"], "save_interval": 3}
    [whole] = run_cases([TrainOptions.of(**options, save=str(tmp_path / "1"))])
    [rest] = run_cases(
        [TrainOptions.of(**options, load=str(tmp_path / "1" / "iter_0000003"), save=str(tmp_path / "2"))]
    )
    assert (rest.losses, rest.weights_sha256) == (whole.losses[3:], whole.weights_sha256)
    # It drops forwards on older weights, and so differs from a run that saves nothing.
    [drifting] = run_cases([TrainOptions.of(**CASES["p=2, Adam"])])
    assert drifting.losses[3] != whole.losses[3]
