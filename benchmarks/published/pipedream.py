"""What PipeDream-2BW's paper measured, beside the planner's estimates of the same runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Final, NamedTuple

from evenpipe.descriptions import Model, cluster, model
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.run import Run

from .tables import table

__all__ = ["Group", "figure_8_gib", "figure_11_billion", "largest_micro_batch", "most_gib", "table_1"]

_SAMPLES: Final = 1024  # a batch of BERT's (§5.1, line 294)
_NODE: Final = "1x8-v100-16gb"
_NODES: Final = "8x8-v100-16gb"
_MICRO_BATCH: Final = 8
_LAYERS: Final = 192
_STEP: Final = 128  # elements of a hidden size


class Group(NamedTuple):
    """Configurations that Table 1 compares: (w, d, b, recomputed), and samples/s as published and as estimated."""

    model: str
    rows: list[tuple[tuple[int, int, int, bool], float, float]]

    @property
    def ordered(self) -> bool:
        """Whether the estimates are in the order of the measurements."""
        return sorted(self.rows, key=lambda row: row[1]) == sorted(self.rows, key=lambda row: row[2])


def table_1() -> list[Group]:
    """Each group. The row (4, 16) of the group on 32 GPUs needs 64, and is left out."""
    found = []
    for (name, nodes), rows in groupby(table("pipedream_table1"), key=lambda row: (row["model"], row["cluster"])):
        estimate = Estimator(model(name), cluster(nodes))
        group: list[tuple[tuple[int, int, int, bool], float, float]] = []
        for row in rows:
            if row["w"] * row["d"] > estimate.cluster.gpus:
                continue
            layout = _layout(estimate.model.layers, row["d"])
            shown = estimate(_stream(row["d"], row["w"], row["b"], row["r"], _SAMPLES, layout))
            group.append(((row["w"], row["d"], row["b"], row["r"]), row["throughput"], shown.samples_per_second))
        found.append(Group(name, group))
    return found


def figure_8_gib(name: str) -> dict[str, float]:
    """The fullest GPU of eight, batch 64 in micro-batches of 8, recomputed; inter-layer parallelism runs one."""
    estimate = Estimator(model(name), cluster(_NODE))
    schedules = {
        "inter-layer": ("1f1b", _MICRO_BATCH),
        "flush": ("1f1b", 64),
        "2bw": ("2bw", 64),
        "gpipe": ("gpipe", 64),
    }
    return {
        system: most_gib(
            estimate(Run(samples, stages=8, micro_batch=_MICRO_BATCH, recompute="full", schedule=schedule))
        )
        for system, (schedule, samples) in schedules.items()
    }


def largest_micro_batch(name: str, depth: int, width: int, recomputed: bool) -> int:
    """That fits (Figures 9 and 10): what is saved grows with it."""
    estimate = Estimator(model(name), cluster(_NODE if depth * width == 8 else _NODES))

    def fits(b: int) -> bool:
        return estimate(_stream(depth, width, b, recomputed, width * depth * b)).fits

    return _largest(fits, 128)


@cache
def figure_11_billion(depth: int) -> float:
    """Parameters of the largest GPT of 192 layers that fits 64 GPUs (the paper does not say which sizes it had)."""

    def of(size: int) -> Model:
        base = model("gpt2-3.8b").model_dump() | {"layers": _LAYERS, "hidden": size * _STEP, "heads": 2 * size}
        return Model.model_validate(base | {"head_dim": 0, "ffn": 0, "key_value_heads": 0})

    def fits(size: int) -> bool:
        return Estimator(of(size), cluster(_NODES))(_stream(depth, 64 // depth, 1, True, 64)).fits

    largest = of(_largest(fits, 64))
    each = 12 * largest.hidden**2 + 13 * largest.hidden
    return (largest.layers * each + (largest.vocabulary + largest.sequence) * largest.hidden) / 1e9


def _stream(
    depth: int, width: int, micro_batch: int, recomputed: bool, samples: int, layout: tuple[int, ...] | None = None
) -> Run:
    """2BW with w pipelines of d stages."""
    return Run(
        samples,
        stages=depth,
        data=width,
        micro_batch=micro_batch,
        recompute="full" if recomputed else "none",
        schedule="2bw",
        layout=layout,
    )


def _layout(layers: int, depth: int) -> tuple[int, ...] | None:
    """Where the layers do not divide, the last stages have one more: BERT-48 on 64 stages."""
    each, more = divmod(layers, depth)
    return tuple(each + (stage >= depth - more) for stage in range(depth)) if more else None


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest from 1 to ``most`` that fits, of which all smaller ones do; 0 if none does."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def most_gib(shown: Estimate) -> float:
    """Of the fullest stage."""
    return max(stage.bytes.total for stage in shown.stages) / 2**30
