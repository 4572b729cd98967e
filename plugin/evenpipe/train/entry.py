"""The function that torchrun's agent starts in every process; light, since the parent imports it too."""

from __future__ import annotations

from importlib import import_module

from evenpipe.train.options import TrainOptions
from evenpipe.train.result import RunResult

__all__ = ["entry"]


def entry(cases: tuple[TrainOptions, ...], device_type: str, journal: str) -> list[RunResult]:
    """Run `cases` in this process; see `evenpipe.megatron.train_engine.process.run_cases`."""
    found: list[RunResult] = import_module("evenpipe.megatron.train_engine.process").run_cases(
        cases, device_type, journal
    )
    return found
