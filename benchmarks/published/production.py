"""What production runs took, beside estimates that no such run was fitted to: how sure the planner may be elsewhere."""

from __future__ import annotations

from typing import Any

from evenpipe.descriptions import cluster, model
from evenpipe.planner.estimate import estimate
from evenpipe.planner.run import Run

from .tables import table

__all__ = ["longer"]


def longer() -> dict[str, tuple[float, bool]]:
    """By run, how much longer it took than estimated, and whether the uncertainty has it."""
    found = {}
    for row in table("production"):
        shown = estimate(model(row["model"]), cluster(row["cluster"]), _run(row))
        seconds = row.get("seconds") or shown.iteration_ms / 1e3 * shown.mfu / row["mfu"]
        ratio = seconds / (shown.iteration_ms / 1e3) - 1
        found[f"{row['model']} on {row['cluster']}"] = ratio, shown.uncertainty.has(ratio)
    return found


def _run(row: dict[str, Any]) -> Run:
    older = row["model"] == "megatron-530b"
    return Run(
        global_batch=row["B"],
        tensor=row["t"],
        stages=row["p"],
        chunks=row["v"],
        data=row["d"],
        recompute=row["recompute"],
        layout=None if older else (0, *(1,) * 126, 0),
        sequence_parallel=not older,
        sharded_optimizer=not older,
        overlap_collectives=not older,
    )
