"""Real training in real processes on Megatron's own schedules: every setting matters, and a run repeats itself."""

import pytest

from evenpipe.train.launch import run_cases
from evenpipe.train.result import RunResult
from tests.end_to_end.trained import actions_are_the_schedules, identical, learned, options_of, peaks_are_predicted

pytestmark = pytest.mark.long

CASES = {
    "gpt pp4": {"stages": 4},
    "bert pp4": {"model": "bert", "stages": 4},
    "dp2 pp2": {"stages": 2, "data_parallel": 2},
    "dropout": {"stages": 4, "dropout": 0.1},
    "bf16": {"stages": 4, "precision": "bf16"},
    "gpt pp4 untied": {"stages": 4, "untie_embeddings": True},
    "dropout again": {"stages": 4, "dropout": 0.1},
    "dropout, full recompute": {"stages": 4, "dropout": 0.1, "recompute": "full"},
    "dropout, selective recompute": {"stages": 4, "dropout": 0.1, "recompute": "selective"},
    "few micro-batches": {"stages": 4, "micro_batches": 3},
    "other seed": {"stages": 4, "seed": 1},
    "no clipping": {"stages": 4, "clip_grad": 0.0},
    "sgd": {"stages": 4, "optimizer": "sgd", "lr": 0.1},
    "sgd with momentum": {"stages": 4, "optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
    "no weight decay": {"stages": 4, "weight_decay": 0.0},
    "warm-up": {"stages": 4, "lr_warmup": 2},
    "warm-up and decay": {"stages": 4, "lr_warmup": 2, "lr_decay": "cosine"},
    "bert bf16": {"stages": 4, "model": "bert", "precision": "bf16"},
    "interleaved fp16": {
        "schedule": "interleaved",
        "stages": 2,
        "chunks": 2,
        "tensor_parallel": 2,
        "precision": "fp16",
    },
    "dp2 pp2 distributed": {"stages": 2, "data_parallel": 2, "distributed_optimizer": True},
    "dp2 pp2 distributed bf16": {
        "stages": 2,
        "data_parallel": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "precision": "bf16",
    },
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


# On the CPU, dropout saves its mask for a moment even where no graph is kept: beside next to nothing, it shows.
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"dropout, full recompute"}))
def test_peaks_are_what_the_schedule_and_one_micro_batch_predict(name: str, results: dict[str, RunResult]) -> None:
    peaks_are_predicted(results[name], OPTIONS[name])


def test_the_same_run_gives_the_same_bits(results: dict[str, RunResult]) -> None:
    assert identical(results["dropout"], results["dropout again"])


def test_what_is_computed_again_is_what_was_dropped(results: dict[str, RunResult]) -> None:
    for scope in ("full", "selective"):
        recomputed = results[f"dropout, {scope} recompute"]
        assert identical(recomputed, results["dropout"])
        assert recomputed.stages[0].peak_saved_bytes < results["dropout"].stages[0].peak_saved_bytes


@pytest.mark.parametrize("name", ["gpt pp4 untied", "dropout", "few micro-batches", "other seed", "no clipping"])
def test_what_should_matter_does(name: str, results: dict[str, RunResult]) -> None:
    assert results[name].weights_sha256 != results["gpt pp4"].weights_sha256


def test_every_setting_of_the_optimizer_matters(results: dict[str, RunResult]) -> None:
    names = ["gpt pp4", "sgd", "sgd with momentum", "no weight decay", "warm-up", "warm-up and decay", "bf16"]
    assert len({results[name].weights_sha256 for name in names}) == len(names)


def test_sharing_out_the_optimizer_keeps_the_training(results: dict[str, RunResult]) -> None:
    assert results["dp2 pp2 distributed"].losses == pytest.approx(results["dp2 pp2"].losses, rel=1e-6)


def test_half_precision_halves_parameters_and_stays_close(results: dict[str, RunResult]) -> None:
    for half, whole in (("bf16", "gpt pp4"), ("bert bf16", "bert pp4")):
        bytes_of = [[stage.parameter_bytes for stage in results[name].stages] for name in (half, whole)]
        assert [2 * nbytes for nbytes in bytes_of[0]] == bytes_of[1]
        assert results[half].losses == pytest.approx(results[whole].losses, rel=1e-2)
