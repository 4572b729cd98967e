"""A hundred iterations on 64 to 512 A100 that vTrain's authors measured, beside estimates that none was fitted to."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from evenpipe.descriptions import Model, cluster, model
from evenpipe.planner.estimate import estimate
from evenpipe.planner.run import Run

__all__ = ["Iteration", "iterations"]


class Iteration(NamedTuple):
    """``error``: estimate over measurement, less 1; ``covered``: the measurement is as far off as the estimate says.

    ``ms``: measured. ``asked``: the model, and how many GPUs and samples; ``run``: how they were divided.
    """

    model: str
    error: float
    covered: bool
    ms: float
    asked: str
    run: str


@cache
def iterations() -> list[Iteration]:
    """Each row of the file, whose first lines say where it is from."""
    found = []
    lines = (Path(__file__).parent / "vtrain.csv").read_text().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        shown = estimate(_model(row), cluster(f"{int(row['gpus']) // 8}x8-a100-80gb"), _run(row))
        ratio, sure = float(row["ms"]) / shown.iteration_ms, shown.uncertainty
        covered = sure.has(ratio - 1)
        asked = f"{row['billion']}B, {row['gpus']} GPUs, B{row['B']}"
        run = f"t{row['t']} d{row['d']} p{row['p']} b{row['b']}"
        found.append(Iteration(f"{row['billion']}B", 1 / ratio - 1, covered, float(row["ms"]), asked, run))
    return found


def _model(row: Mapping[str, str]) -> Model:
    sizes = {key: int(row[key]) for key in ("layers", "hidden", "heads")}
    derived = {"head_dim": 0, "ffn": 0, "key_value_heads": 0}
    return Model.model_validate(model("gpt3-175b").model_dump() | sizes | derived | {"name": f"{row['billion']}B"})


def _run(row: Mapping[str, str]) -> Run:
    return Run(
        global_batch=int(row["B"]),
        tensor=int(row["t"]),
        stages=int(row["p"]),
        data=int(row["d"]),
        micro_batch=int(row["b"]),
        recompute="full",
        sequence_parallel=False,
        sharded_optimizer=False,
    )
