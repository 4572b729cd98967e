"""2BW says which weights gradients are taken at, and any optimizer steps with them: by the rule of one process.

Every optimizer with every correction of the delay, also where a run saves on its way, and where it is gone on with.
Evaluations and skipped steps in fp16: `tests/two_bw/test_interruptions.py`.
"""

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core.optimizer.layer_wise_optimizer")

from evenpipe.train import process
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult
from tests.end_to_end.optimizers import LAYER_WISE, RATES, Optimizers, in_place_of_adamw
from tests.oracle.process import Case, Trained, train_cases
from tests.selected import marked, selected

ITERATIONS, SAVED_AFTER = 20, 14
_SMALL = {"hidden": 16, "heads": 2, "seq_length": 16, "iterations": ITERATIONS, "schedule": "2bw", "lr_decay": "cosine"}
_PIPELINES: dict[int, dict[str, Any]] = {
    2: {"stages": 2, "layers": 2, "micro_batches": 2},
    4: {"stages": 4, "layers": 4, "micro_batches": 5, "bpipe": True},
}
_UNTIED, _UNCLIPPED = {"untie_embeddings": True}, {"clip_grad": 0.0}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "SGD": {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1, "micro_batches": 5},
    "Lion": {},
    "LARS": _UNTIED,
    "RMSprop": {"weight_decay": 0.0},
    "Adafactor": _UNCLIPPED,
    "Muon": {},
}
_CORRECTIONS = ("none", "weight-prediction", "nesterov", "error-feedback")
#: Nesterov's look-ahead is by a momentum.
_WITHOUT_MOMENTUM = ("LARS", "RMSprop", "Adafactor")
_SHARED_OUT = {**_PIPELINES[2], **_UNCLIPPED, "data_parallel": 2}

Name = tuple[str, str, int]
CASES: dict[Name, dict[str, Any]] = {
    (optimizer, correction, stages): {**_PIPELINES[stages], **settings}
    for stages in _PIPELINES
    for optimizer, settings in _OPTIMIZERS.items()
    for correction in _CORRECTIONS
    if correction != "nesterov" or optimizer not in _WITHOUT_MOMENTUM
}
CASES[LAYER_WISE, "none", 2] = _SHARED_OUT
CASES["Adam", "error-feedback", 22] = {**_SHARED_OUT, "distributed_optimizer": True}
#: Of four stages, every correction once.
FOUR = [("Adam", "error-feedback", 4), ("Lion", "nesterov", 4), ("LARS", "none", 4), ("Muon", "weight-prediction", 4)]
LONG = [name for name in CASES if name[2] == 4 and name not in FOUR]


def options_of(name: Name, **others: Any) -> TrainOptions:
    optimizer, correction, _ = name
    rate = {"lr": RATES[optimizer]} if optimizer in RATES else {}
    return TrainOptions.of(**{**_SMALL, **rate, **CASES[name]}, delay_correction=correction, **others)


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[Name]:
    return sorted(selected(request, "name"), key=lambda name: options_of(name).world_size)


@pytest.fixture(scope="module")
def runs(names: list[Name], tmp_path_factory: pytest.TempPathFactory) -> dict[Name, tuple[RunResult, RunResult]]:
    """Of each a run that saves on its way, and one that goes on from there."""
    cases = []
    for name in names:
        folder = tmp_path_factory.mktemp("saved")
        cases.append(options_of(name, save=str(folder), save_interval=SAVED_AFTER))
        cases.append(options_of(name, load=str(folder / f"iter_{SAVED_AFTER:07d}")))
    with mock.patch.object(process, "train_cases", Optimizers()):
        found = iter(run_cases(cases))
    return dict(zip(names, zip(found, found, strict=True), strict=True))


@pytest.fixture(scope="module")
def oracles(names: list[Name]) -> dict[Name, Trained]:
    cases = [Case(options_of(name), 1) for name in names]
    return dict(zip(names, train_cases(cases, in_place_of_adamw), strict=True))


@pytest.mark.parametrize("name", marked([(name,) for name in CASES], LONG), ids=lambda name: "-".join(map(str, name)))
def test_any_optimizer_steps_a_batch_late(
    runs: dict[Name, tuple[RunResult, RunResult]], oracles: dict[Name, Trained], name: Name
) -> None:
    (run, rest), oracle = runs[name], oracles[name]
    assert run.losses[-1] < run.losses[0]
    assert run.losses == oracle.losses
    assert run.weights_sha256 == oracle.weights_sha256
    # Layer-wise or sharded, each replica adds up the squares of its own parameters.
    assert run.grad_norms == pytest.approx(oracle.grad_norms, rel=1e-6)
    assert rest.losses == oracle.losses[SAVED_AFTER:]
    assert rest.weights_sha256 == oracle.weights_sha256


def test_each_correction_and_each_optimizer_has_losses_of_its_own(oracles: dict[Name, Trained]) -> None:
    """Or a case would show nothing of them. Error feedback takes gradients where prediction does."""
    found = [oracle.losses for name, oracle in oracles.items() if name[2] == 2 and name[1] != "error-feedback"]
    assert len(set(found)) == len(found)
