"""What Korthikanti et al. measured, beside the planner's estimates of the same runs."""

from __future__ import annotations

from typing import Any, Final

from evenpipe.descriptions import cluster, model
from evenpipe.planner.estimate import estimate
from evenpipe.planner.kernels import FITTED, Calibration
from evenpipe.planner.operations.parts import Blocks
from evenpipe.planner.run import Run
from evenpipe.planner.stage_bytes import chunks_of

from .tables import table

__all__ = ["activation_errors", "relative_errors"]

_COLUMNS: Final[dict[str, dict[str, Any]]] = {
    "full": {"recompute": "full", "sequence_parallel": False},
    "selective": {"recompute": "selective", "sequence_parallel": True},
}


def relative_errors(calibration: Calibration = FITTED) -> dict[str, float]:
    """Of the eight iteration times of Table 5: estimate over measurement, less 1."""
    found = {}
    for row in table("korthikanti"):
        nodes = cluster(f"{row['t'] * row['p'] // 8}x8-dgx-a100-80gb")
        for column, settings in _COLUMNS.items():
            shown = estimate(model(row["model"]), nodes, _run(row, **settings), calibration=calibration)
            found[f"{row['model']} {column}"] = shown.iteration_ms / 1e3 / row[column] - 1
    return found


def activation_errors() -> dict[str, float]:
    """Bytes that the layers of the first stage save, over the paper's, less 1."""
    found = {}
    for row in table("korthikanti"):
        for column, settings in (
            ("none", {"recompute": "none", "sequence_parallel": False}),
            ("selective", {"recompute": "selective", "sequence_parallel": True}),
        ):
            run = _run(row, **settings)
            of = model(row["model"])
            blocks = Blocks(of, run)
            [chunk] = chunks_of([{"layer": 1}], blocks)
            # With v chunks a stage, the first holds 1 + (p − 1) / (p v) times its own layers' (§4.2.3).
            held = of.layers * (1 + (row["p"] - 1) / (row["p"] * row["v"]) if row["v"] > 1 else 1)
            found[f"{row['model']} {column}"] = held * chunk.kept_bytes / 2**30 / row[f"{column}_gib"] - 1
    return found


def _run(row: dict[str, Any], **settings: Any) -> Run:
    return Run(
        tensor=row["t"],
        stages=row["p"],
        chunks=row["v"],
        micro_batch=row["b"],
        global_batch=row["B"],
        sharded_optimizer=False,
        precision="fp16",
        attention="unfused",
        **settings,
    )
