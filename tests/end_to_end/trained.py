"""What a run on Megatron's own schedules is to have measured, whatever its settings."""

from __future__ import annotations

import math

import pytest

from evenpipe.train.options import TrainOptions
from evenpipe.train.predict import predict
from evenpipe.train.result import RunResult

__all__ = ["actions_are_the_schedules", "identical", "learned", "options_of", "peaks_are_predicted"]

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


def options_of(cases: dict[str, dict[str, object]]) -> dict[str, TrainOptions]:
    """Each a small model on Megatron's own schedule; all of four processes, so that they start once."""
    return {name: TrainOptions.of(**{**TINY, **values}) for name, values in cases.items()}


def learned(result: RunResult, options: TrainOptions) -> None:
    """The loss fell, and all was measured."""
    assert all(map(math.isfinite, result.losses))
    assert result.losses[-1] < result.losses[0]
    assert len(result.losses) == len(result.iteration_ms) == options.iterations
    assert all(ms > 0 for ms in result.iteration_ms)
    assert len(result.grad_norms) == options.iterations
    assert [norm is None for norm in result.grad_norms] == [i in result.skipped_iterations for i in range(3)]
    assert not result.skipped_iterations or options.initial_loss_scale == 2.0**20
    assert [stage.peak_live for stage in result.stages] == list(options.plan.peak_live)
    assert [stage.evicted_bytes for stage in result.stages] == [0] * options.stages


def actions_are_the_schedules(result: RunResult, options: TrainOptions) -> None:
    """Megatron carries out the actions of the schedule of that name."""
    assert tuple(tuple(span.action for span in spans) for spans in result.spans) == options.plan.actions


def peaks_are_predicted(result: RunResult, options: TrainOptions) -> None:
    """By the schedule and one micro-batch."""
    predicted = predict(options.program, result)
    for stage, measured in zip(predicted.stages, result.stages, strict=True):
        assert measured.peak_saved_bytes == pytest.approx(stage.peak_bytes, rel=0.02)


def identical(one: RunResult, other: RunResult) -> bool:
    return (one.losses, one.weights_sha256) == (other.losses, other.weights_sha256)
