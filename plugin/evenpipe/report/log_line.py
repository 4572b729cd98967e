"""What each stage held, moved and waited for, predicted and measured, as lines of a log and scalars of its writers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

__all__ = ["Figures", "Taken", "comparison_lines", "kept_line", "log_line", "median_ms", "scalars", "write_scalars"]

_MIB: Final = 1 << 20


class Figures(Protocol):
    """The figures of one stage.

    They are: live micro-batches, bytes that these save, bytes given to the partner, and ms waited for transfers.
    """

    @property
    def peak_live(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def evicted_bytes(self) -> int: ...
    @property
    def exposed_ms(self) -> float: ...


class _Column(NamedTuple):
    """A figure in the log: its name there and among scalars, decimals, and its value in the unit that these name."""

    title: str
    tag: str
    decimals: int
    value: Callable[[Figures], float]


_COLUMNS = (
    _Column("peak live", "peak-live", 0, lambda figures: figures.peak_live),
    _Column("peak saved MiB", "peak-saved-MiB", 1, lambda figures: figures.peak_bytes / _MIB),
    _Column("evicted MiB", "evicted-MiB", 1, lambda figures: figures.evicted_bytes / _MIB),
    _Column("transfers exposed ms", "transfers-exposed-ms", 1, lambda figures: figures.exposed_ms),
)


def log_line(iteration: int, stages: Sequence[Figures]) -> str:
    """One line, values in the order of stages."""
    columns = [
        f"{title}: {' '.join(f'{value(figures):.{decimals}f}' for figures in stages)}"
        for title, _, decimals, value in _COLUMNS
    ]
    return f"iteration {iteration} | {' | '.join(columns)} |"


def scalars(stages: Sequence[Figures]) -> dict[str, float]:
    """Return the same by names for TensorBoard and Weights & Biases."""
    return {
        f"evenpipe/{column.tag}/stage-{stage}": column.value(figures)
        for column in _COLUMNS
        for stage, figures in enumerate(stages)
    }


def write_scalars(stages: Sequence[Figures], iteration: int, tensorboard: Any | None, wandb: Any | None) -> None:
    """Give them to a `SummaryWriter` and to what Weights & Biases' `init` returned; None for what there is not."""
    found = scalars(stages)
    if tensorboard is not None:
        for tag, value in found.items():
            tensorboard.add_scalar(tag, value, iteration)
    if wandb is not None:
        wandb.log(found, iteration)


def kept_line(stage: int, nbytes: Mapping[str, int]) -> str:
    """Return the line on what a micro-batch saves in tensors that cannot be taken apart, by their types.

    Such tensors stay on their stage: they are neither moved nor counted.
    """
    each = ", ".join(f"{name} {size / _MIB:.1f} MiB" for name, size in sorted(nbytes.items()))
    return f"stage {stage}, of a micro-batch: saved in types that cannot be taken apart, not counted nor moved: {each}"


class Taken(NamedTuple):
    """By a stage: compute milliseconds of a micro-batch, through all of its chunks; bytes that it holds at most."""

    ms: float
    peak_bytes: int


def comparison_lines(names: Sequence[str], predicted: Sequence[Taken], measured: Sequence[Taken]) -> list[str]:
    """Return a line a stage; `names`: what each has of the model."""
    return [
        f"stage {stage} ({name}) | ms a micro-batch: {plan.ms:.2f} predicted, {run.ms:.2f} measured | "
        f"peak MiB: {plan.peak_bytes / _MIB:.1f} predicted, {run.peak_bytes / _MIB:.1f} measured |"
        for stage, (name, plan, run) in enumerate(zip(names, predicted, measured, strict=True))
    ]


def median_ms(iteration_ms: Sequence[float]) -> float:
    """Return the median of all iterations but the first, where there are others.

    The first also starts up what the others find running.
    """
    return median(iteration_ms[1:] or iteration_ms)
