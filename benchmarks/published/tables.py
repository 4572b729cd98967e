"""The published tables, and the runs that their rows were."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from evenpipe.descriptions import cluster, model
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.kernels import FITTED, Calibration
from evenpipe.planner.run import Recompute, Run

__all__ = ["GPUS", "Row", "estimators", "rows", "run_of", "table", "taken"]

#: GPUs and samples of an iteration (BPipe Table 1).
GPUS: Final = {"gpt3-13b": (8, 32), "gpt3-96b": (32, 128), "gpt3-134b": (48, 192)}


class Row(NamedTuple):
    """One of BPipe's Table 7."""

    model: str
    id: int
    t: int
    p: int
    b: int
    recompute: Recompute
    mfu: float
    bpipe: bool
    line: int


@cache
def table(name: str) -> Sequence[dict[str, Any]]:
    """The rows of a table, or of its exceptions, as in the file."""
    document = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())
    found: Sequence[dict[str, Any]] = document[name]
    return found


def rows() -> list[Row]:
    """All of Table 7."""
    return [Row(**row) for row in table("table7")]


def taken() -> list[Row]:
    """Those whose MFU is compared: without misprints, and without those that were slowed down by the allocator."""
    left_out = [*table("misprints"), *table("thrashing")]
    return [
        row for row in rows() if all(any(getattr(row, key) != value for key, value in one.items()) for one in left_out)
    ]


def run_of(row: Row, **changed: Any) -> Run:
    """The run that a row was, or another one like it."""
    gpus, samples = GPUS[row.model]
    run = Run(
        tensor=row.t,
        stages=row.p,
        data=gpus // (row.t * row.p),
        micro_batch=row.b,
        global_batch=samples,
        recompute=row.recompute,
        bpipe=row.bpipe,
    )
    return run if not changed else Run(**{**run.__dict__, **changed})


class estimators(dict[str, Estimator]):  # noqa: N801
    """By model, what estimates BPipe's runs of it; programs are kept from one calibration to the next."""

    def __init__(self, calibration: Calibration = FITTED) -> None:
        nodes = {name: cluster(f"{gpus // 8}x8-a100-80gb") for name, (gpus, _) in GPUS.items()}
        super().__init__({name: Estimator(model(name), nodes[name], calibration=calibration) for name in GPUS})

    def __call__(self, row: Row, **changed: Any) -> Estimate:
        return self[row.model](run_of(row, **changed))
