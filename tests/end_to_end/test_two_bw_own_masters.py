"""2BW with Megatron's precision-aware optimizer, and with the one that steps on the host: the rule of one process.

Their state belongs to the newest weights, and those are what each step begins with.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from evenpipe.train import process
from evenpipe.train.launch import StageFailed, run_cases
from evenpipe.train.options import TrainOptions
from tests.megatron.own_masters import WithOwnMasters
from tests.oracle.process import Case, train_cases

_SMALL = {"hidden": 16, "heads": 2, "seq_length": 16, "iterations": 5, "schedule": "2bw", "lr": 0.01, "layers": 4}
_BF16 = {**_SMALL, "precision": "bf16", "distributed_optimizer": True, "stages": 2, "clip_grad": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "p=2": {**_BF16, "micro_batches": 3, "lr_decay": "cosine"},
    "p=2, predicted": {**_BF16, "micro_batches": 2, "delay_correction": "weight-prediction"},
    "p=2, clipped": {**_BF16, "micro_batches": 2, "clip_grad": 0.5},
    "p=4, BPipe": {**_BF16, "stages": 4, "micro_batches": 4, "bpipe": True},
    "DP2 x PP2": {**_BF16, "micro_batches": 2, "data_parallel": 2},
}
#: The optimizer's kind, and the cases that it trains.
OF_KINDS = {"remainders": [*CASES], "masters": ["p=2"], "on the host": ["p=2", "p=2, predicted", "p=2, clipped"]}
#: A norm is added up in another order than the oracle's, and weights are predicted in their own 16 bits: there the
#: reference is Megatron's own optimizer.
ROUNDED = ("p=2, clipped", "p=2, predicted")


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[Any, str]]:
    """Losses and weights of one process, by the case."""
    options = [TrainOptions.of(**case) for case in CASES.values()]
    found = dict(zip(CASES, train_cases([Case(one, 1) for one in options]), strict=True))
    for name, run in zip(ROUNDED, run_cases([TrainOptions.of(**CASES[name]) for name in ROUNDED]), strict=True):
        assert run.losses == pytest.approx(found[name].losses, rel=2e-3)
        found[name] = run
    return {name: (one.losses, one.weights_sha256) for name, one in found.items()}


@pytest.mark.parametrize("kind", OF_KINDS)
def test_steps_are_those_of_one_process_with_masters(kind: str, expected: dict[str, tuple[Any, str]]) -> None:
    names = OF_KINDS[kind]
    with mock.patch.object(process, "train_cases", WithOwnMasters(kind)):
        runs = run_cases([TrainOptions.of(**CASES[name]) for name in names])
    for name, run in zip(names, runs, strict=True):
        assert (run.losses, run.weights_sha256) == expected[name], name


def test_error_feedback_is_refused_where_masters_are_out_of_its_reach() -> None:
    """It would correct the 16 bits alone, which the next step makes anew of the masters."""
    with (
        mock.patch.object(process, "train_cases", WithOwnMasters("remainders")),
        pytest.raises(StageFailed, match=r"error-feedback corrects masters, which FusedAdam keeps .*: use weight-"),
    ):
        run_cases([TrainOptions.of(**_BF16, micro_batches=2, delay_correction="error-feedback")])
