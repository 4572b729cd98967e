"""Real training in real processes on Megatron's own schedules: what is measured, and that every setting matters."""

import pytest

from evenpipe.train.launch import run_cases
from evenpipe.train.result import RunResult
from tests.end_to_end.trained import actions_are_the_schedules, identical, learned, options_of, peaks_are_predicted
from tests.selected import marked, selected

CASES = {
    "gpt pp4": {"stages": 4},
    "bert pp4": {"model": "bert", "stages": 4},
    "tp2 pp2": {"stages": 2, "tensor_parallel": 2},
    "dp2 pp2": {"stages": 2, "data_parallel": 2},
    "dp2 pp2 overlapped": {"stages": 2, "data_parallel": 2, "overlap_grad_reduce": True},
    "interleaved tp2 pp2": {"schedule": "interleaved", "stages": 2, "chunks": 2, "tensor_parallel": 2},
    "dropout": {"stages": 4, "dropout": 0.1},
    "bf16": {"stages": 4, "precision": "bf16"},
    "fp16 from a high scale": {"stages": 4, "precision": "fp16", "initial_loss_scale": 2.0**20},
}
#: What one setting each changes.
SETTINGS = {
    "gpt pp4 untied": {"stages": 4, "untie_embeddings": True},
    "few micro-batches": {"stages": 4, "micro_batches": 3},
    "other seed": {"stages": 4, "seed": 1},
    "no clipping": {"stages": 4, "clip_grad": 0.0},
    "sgd": {"stages": 4, "optimizer": "sgd", "lr": 0.1},
    "sgd with momentum": {"stages": 4, "optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
    "no weight decay": {"stages": 4, "weight_decay": 0.0},
    "warm-up": {"stages": 4, "lr_warmup": 2},
    "warm-up and decay": {"stages": 4, "lr_warmup": 2, "lr_decay": "cosine"},
}
OPTIONS = options_of(CASES | SETTINGS)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, RunResult]:
    """The runs that are looked at: all, if one of the settings is, since they are compared with others."""
    asked = selected(request, "name", others=CASES)
    names = [name for name in OPTIONS if name in asked or asked & SETTINGS.keys()]
    return dict(zip(names, run_cases([OPTIONS[name] for name in names]), strict=True))


@pytest.mark.parametrize("name", marked(OPTIONS, SETTINGS))
def test_the_model_learns_and_is_measured(name: str, results: dict[str, RunResult]) -> None:
    learned(results[name], OPTIONS[name])


@pytest.mark.parametrize("name", marked(OPTIONS, SETTINGS))
def test_megatron_carries_out_the_actions_of_the_schedule_of_that_name(
    name: str, results: dict[str, RunResult]
) -> None:
    actions_are_the_schedules(results[name], OPTIONS[name])


@pytest.mark.parametrize("name", marked(OPTIONS, SETTINGS))
def test_peaks_are_what_the_schedule_and_one_micro_batch_predict(name: str, results: dict[str, RunResult]) -> None:
    peaks_are_predicted(results[name], OPTIONS[name])


def test_overlapping_the_gradient_reduction_changes_no_bit(results: dict[str, RunResult]) -> None:
    assert identical(results["dp2 pp2"], results["dp2 pp2 overlapped"])


def test_an_overflow_in_fp16_skips_the_step_once_and_the_run_goes_on(results: dict[str, RunResult]) -> None:
    assert results["fp16 from a high scale"].skipped_iterations == (0,)


def test_the_first_loss_does_not_depend_on_how_the_model_is_cut(results: dict[str, RunResult]) -> None:
    whole = results["gpt pp4"].losses[0]
    for name in ("tp2 pp2", "interleaved tp2 pp2"):
        assert results[name].losses[0] == pytest.approx(whole, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt pp4 untied", "dropout", "few micro-batches", "other seed", "no clipping"])
def test_what_should_matter_does(name: str, results: dict[str, RunResult]) -> None:
    assert results[name].weights_sha256 != results["gpt pp4"].weights_sha256


@pytest.mark.long
def test_every_setting_of_the_optimizer_matters(results: dict[str, RunResult]) -> None:
    names = ["gpt pp4", "sgd", "sgd with momentum", "no weight decay", "warm-up", "warm-up and decay", "bf16"]
    assert len({results[name].weights_sha256 for name in names}) == len(names)
