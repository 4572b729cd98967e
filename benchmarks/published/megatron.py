"""What Megatron-LM's own runs of its tests held and took on H100 and A100, beside the planner's estimates."""

from __future__ import annotations

from typing import Any, NamedTuple

from evenpipe.descriptions import Model, cluster
from evenpipe.planner.estimate import estimate
from evenpipe.planner.run import Run
from evenpipe.planner.stage_bytes import slack

from .tables import table

__all__ = ["GoldenRun", "golden_runs"]


class GoldenRun(NamedTuple):
    """GiB allocated at most on the last rank; how much longer an iteration took than estimated, and if it says so."""

    name: str
    gib: float
    estimated_gib: float
    longer: float
    covered: bool


def golden_runs() -> list[GoldenRun]:
    """Each run. What is allocated is what stays, what is saved and what comes and goes: no reserve, no slack."""
    found = []
    for row in table("megatron_tests"):
        shown = estimate(_model(row), cluster(row["cluster"]), _run(row))
        held = shown.stages[-1].bytes
        comes_and_goes = (held.activations + held.buffers) / slack(shown.run)
        gib = (held.weights + held.gradients + held.optimizer + comes_and_goes) / 2**30
        longer = row["seconds"] / (shown.iteration_ms / 1e3) - 1
        name = f"7B t={row['t']} p={row['p']} v={row['v']} on {row['cluster']}"
        covered = shown.uncertainty.has(longer)
        found.append(GoldenRun(name, row["allocated"] / 2**30, gib, longer, covered))
    return found


def _model(row: dict[str, Any]) -> Model:
    return Model(
        name="7B",
        layers=32,
        hidden=4096,
        heads=32,
        key_value_heads=8,
        tied=False,
        vocabulary=row["vocabulary"],
        sequence=8192,
    )


def _run(row: dict[str, Any]) -> Run:
    return Run(
        global_batch=8,
        tensor=row["t"],
        stages=row["p"],
        data=8 // (row["t"] * row["p"]),
        chunks=row["v"],
        micro_batch=row["b"],
        precision="bf16",
        attention="flash",
        gradients_in_fp32=True,
        sharded_optimizer=True,
        sequence_parallel=False,
        overlap_gradients=True,
        overlap_parameters=True,
    )
