"""Real training in real processes on Megatron's own schedules: what is measured, and that a run repeats itself."""

import math

import pytest

from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.predict import predict
from evenpipe.train.result import RunResult

TINY = {
    "engine": "megatron",
    "layers": 4,
    "hidden": 32,
    "heads": 2,
    "seq_length": 32,
    "micro_batches": 8,
    "micro_batch_size": 2,
    "iterations": 3,
}
# All of four processes, so that they start once.
CASES = {
    "gpt pp4": {"stages": 4},
    "gpt pp4 untied": {"stages": 4, "untie_embeddings": True},
    "bert pp4": {"model": "bert", "stages": 4},
    "tp2 pp2": {"stages": 2, "tensor_parallel": 2},
    "dp2 pp2": {"stages": 2, "data_parallel": 2},
    "dp2 pp2 overlapped": {"stages": 2, "data_parallel": 2, "overlap_grad_reduce": True},
    "interleaved tp2 pp2": {"schedule": "interleaved", "stages": 2, "chunks": 2, "tensor_parallel": 2},
    "dropout": {"stages": 4, "dropout": 0.1},
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
    "bf16": {"stages": 4, "precision": "bf16"},
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
    "fp16 from a high scale": {"stages": 4, "precision": "fp16", "initial_loss_scale": 2.0**20},
}
OPTIONS = {name: TrainOptions.of(**{**TINY, **values}) for name, values in CASES.items()}


@pytest.fixture(scope="module")
def results() -> dict[str, RunResult]:
    return dict(zip(OPTIONS, run_cases(list(OPTIONS.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_model_learns_and_is_measured(name: str, results: dict[str, RunResult]) -> None:
    result, options = results[name], OPTIONS[name]
    assert all(map(math.isfinite, result.losses))
    assert result.losses[-1] < result.losses[0]
    assert len(result.losses) == len(result.iteration_ms) == options.iterations
    assert all(ms > 0 for ms in result.iteration_ms)
    assert len(result.grad_norms) == options.iterations
    assert [norm is None for norm in result.grad_norms] == [i in result.skipped_iterations for i in range(3)]
    assert not result.skipped_iterations or name == "fp16 from a high scale"
    assert [stage.peak_live for stage in result.stages] == list(options.plan.peak_live)
    assert [stage.evicted_bytes for stage in result.stages] == [0] * options.stages


@pytest.mark.parametrize("name", CASES)
def test_megatron_carries_out_the_actions_of_the_schedule_of_that_name(
    name: str, results: dict[str, RunResult]
) -> None:
    actions = tuple(tuple(span.action for span in spans) for spans in results[name].spans)
    assert actions == OPTIONS[name].plan.actions


# On the CPU, dropout saves its mask for a moment even where no graph is kept: beside next to nothing, it shows.
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"dropout, full recompute"}))
def test_peaks_are_what_the_schedule_and_one_micro_batch_predict(name: str, results: dict[str, RunResult]) -> None:
    predicted = predict(OPTIONS[name].program, results[name])
    for stage, measured in zip(predicted.stages, results[name].stages, strict=True):
        assert measured.peak_saved_bytes == pytest.approx(stage.peak_bytes, rel=0.02)


def identical(one: RunResult, other: RunResult) -> bool:
    return (one.losses, one.weights_sha256) == (other.losses, other.weights_sha256)


def test_the_same_run_gives_the_same_bits(results: dict[str, RunResult]) -> None:
    assert identical(results["dropout"], results["dropout again"])


def test_what_is_computed_again_is_what_was_dropped(results: dict[str, RunResult]) -> None:
    for scope in ("full", "selective"):
        recomputed = results[f"dropout, {scope} recompute"]
        assert identical(recomputed, results["dropout"])
        assert recomputed.stages[0].peak_saved_bytes < results["dropout"].stages[0].peak_saved_bytes


def test_overlapping_the_gradient_reduction_changes_no_bit(results: dict[str, RunResult]) -> None:
    assert identical(results["dp2 pp2"], results["dp2 pp2 overlapped"])


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


def test_an_overflow_in_fp16_skips_the_step_once_and_the_run_goes_on(results: dict[str, RunResult]) -> None:
    assert results["fp16 from a high scale"].skipped_iterations == (0,)


def test_the_first_loss_does_not_depend_on_how_the_model_is_cut(results: dict[str, RunResult]) -> None:
    whole = results["gpt pp4"].losses[0]
    for name in ("tp2 pp2", "interleaved tp2 pp2"):
        assert results[name].losses[0] == pytest.approx(whole, rel=1e-6)
