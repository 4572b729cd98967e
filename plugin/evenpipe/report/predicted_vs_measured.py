"""What a plan predicted of each stage, beside what a run measured, as lines of a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["Taken", "comparison_lines"]

_MIB: Final = 1 << 20


class Taken(NamedTuple):
    """By a stage: compute milliseconds of a micro-batch, through all of its chunks; bytes that it holds at most."""

    ms: float
    peak_bytes: int


def comparison_lines(names: Sequence[str], predicted: Sequence[Taken], measured: Sequence[Taken]) -> list[str]:
    """A line a stage; `names`: what each has of the model."""
    return [
        f"stage {stage} ({name}) | ms a micro-batch: {plan.ms:.2f} predicted, {run.ms:.2f} measured | "
        f"peak MiB: {plan.peak_bytes / _MIB:.1f} predicted, {run.peak_bytes / _MIB:.1f} measured |"
        for stage, (name, plan, run) in enumerate(zip(names, predicted, measured, strict=True))
    ]
