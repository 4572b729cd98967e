"""Real training in real processes on Megatron's own schedules: what is measured."""

import pytest

from evenpipe.train.launch import run_cases
from evenpipe.train.result import RunResult
from tests.end_to_end.trained import actions_are_the_schedules, identical, learned, options_of, peaks_are_predicted

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
OPTIONS = options_of(CASES)


@pytest.fixture(scope="module")
def results() -> dict[str, RunResult]:
    return dict(zip(OPTIONS, run_cases(list(OPTIONS.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_model_learns_and_is_measured(name: str, results: dict[str, RunResult]) -> None:
    learned(results[name], OPTIONS[name])


@pytest.mark.parametrize("name", CASES)
def test_megatron_carries_out_the_actions_of_the_schedule_of_that_name(
    name: str, results: dict[str, RunResult]
) -> None:
    actions_are_the_schedules(results[name], OPTIONS[name])


@pytest.mark.parametrize("name", CASES)
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
