"""2BW skips the step of a batch whose gradient's norm is beyond `grad_norm_skip_threshold`, as one process does."""

from __future__ import annotations

from typing import Any
from unittest import mock

from evenpipe.train import process
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from tests.oracle.process import Case, train_cases

_SMALL: dict[str, Any] = {
    "hidden": 16,
    "heads": 2,
    "seq_length": 16,
    "iterations": 8,
    "schedule": "2bw",
    "lr": 0.01,
    "layers": 2,
}
LARGEST = 1.45


class Skipping:
    """Stands for `evenpipe.train.process.train_cases`: Megatron's configuration has the limit, as since 0.19."""

    def __call__(self, cases: Any, *rest: Any) -> Any:
        from evenpipe.megatron.train_engine import learner
        from evenpipe.train.process import train_cases

        make = learner.OptimizerConfig

        def made(**given: Any) -> Any:
            config = make(**given)
            config.grad_norm_skip_threshold = LARGEST
            return config

        with mock.patch.object(learner, "OptimizerConfig", made):
            return train_cases(cases, *rest)


def test_a_step_beyond_the_largest_norm_is_skipped_with_clipping_and_without() -> None:
    cases = [TrainOptions.of(**_SMALL, stages=2, micro_batches=3, clip_grad=most) for most in (0.0, 1.0)]
    with mock.patch.object(process, "train_cases", Skipping()):
        runs = run_cases(cases)
    for run, one in zip(runs, train_cases([Case(each, 1, largest_norm=LARGEST) for each in cases]), strict=True):
        assert run.skipped_iterations == tuple(place for place, norm in enumerate(one.grad_norms) if norm > LARGEST)
        assert 0 < len(run.skipped_iterations) < _SMALL["iterations"]
        assert (run.losses, run.weights_sha256) == (one.losses, one.weights_sha256)
