"""The function that torchrun's agent starts in every process; light, since the parent imports it too."""

from __future__ import annotations

from evenpipe.megatron.trainer.options import TrainOptions
from evenpipe.megatron.trainer.result import RunResult

__all__ = ["entry"]


def entry(cases: tuple[TrainOptions, ...], device_type: str, journal: str) -> list[RunResult]:
    """Run `cases` in this process; see `evenpipe.megatron.trainer.process.run_cases`."""
    from evenpipe.megatron.trainer.process import run_cases

    return run_cases(cases, device_type, journal)
