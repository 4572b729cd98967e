"""Six schedules as AMD's Primus measured them: Llama 2 7B, eight stages on one node of MI300X.

AMD-AGI/Primus, docs_deprecated/tech_blogs/primus_pipeline/primus_pipeline.md. Batch and sequence are not published: 32
micro-batches are what 1F1B's speed beside that with two chunks implies, (m + 7) / (m + 3.5) = 1.09.
"""

from __future__ import annotations

from itertools import combinations
from typing import Final, NamedTuple

from evenpipe.descriptions import Model, cluster, framework
from evenpipe.planner.estimate import Estimator
from evenpipe.planner.run import Run

__all__ = ["Speed", "misordered", "speeds"]

#: Tokens/s/GPU by schedule and model chunks. Its "zbb", which holds 1.02 times as much as 1F1B, is taken for ZB-H1.
_MEASURED: Final = {
    ("1f1b", 1): 10057.0,
    ("interleaved", 2): 10974.0,
    ("zb-h1", 1): 11411.0,
    ("zbv", 2): 11347.0,
    ("v-half", 2): 10894.0,
    ("v-min", 2): 8897.2,
}
_MICRO_BATCHES: Final = 32
_MODEL: Final = Model(
    name="llama2-7b",
    layers=32,
    hidden=4096,
    heads=32,
    ffn=11008,
    gated=True,
    norm="rms",
    biases=False,
    dropout=False,
    positions="rotary",
    vocabulary=32000,
    sequence=4096,
    tied=False,
)


class Speed(NamedTuple):
    """A schedule's speed over 1F1B's."""

    schedule: str
    measured: float
    estimated: float


def speeds() -> list[Speed]:
    """Return each, fastest first as measured."""
    estimate = Estimator(_MODEL, cluster("1x8-mi300x"), framework("megatron"))
    usual = {"overlap_gradients": False, "overlap_parameters": False, "micro_batch": 4}  # which Primus asks for
    ms = {
        (schedule, chunks): estimate(
            Run(4 * _MICRO_BATCHES, stages=8, chunks=chunks, schedule=schedule, **usual)  # type: ignore[arg-type]
        ).iteration_ms
        for schedule, chunks in _MEASURED
    }
    plain = "1f1b", 1
    found = [Speed(key[0], rate / _MEASURED[plain], ms[plain] / ms[key]) for key, rate in _MEASURED.items()]
    return sorted(found, key=lambda one: -one.measured)


def misordered(found: list[Speed]) -> list[tuple[Speed, Speed]]:
    """Return the pairs that the estimates have the other way round."""
    return [(faster, other) for faster, other in combinations(found, 2) if faster.estimated < other.estimated]
