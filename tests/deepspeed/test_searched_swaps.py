"""A searched table that swaps to hosts, under a real DeepSpeed engine: the stock engine's losses and weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenpipe.order_search.costs import Part, RunCosts
from evenpipe.order_search.search import Effort
from evenpipe.simulate.searched import searched
from tests.deepspeed.job import run_cases

pytest.importorskip("deepspeed")

STAGES, MICRO_BATCHES = 4, 8


def test_a_table_that_swaps_trains_to_the_bits_of_the_stock_engine(tmp_path: Path) -> None:
    """Even stages that hold three micro-batches each; the first one needs four."""
    part = Part(forward_ms=2, input_gradient_ms=2, weight_gradient_ms=2, saved_bytes=100)
    costs = RunCosts(
        format="evenpipe.costs/1",
        placement="straight",
        parts=[part] * STAGES,
        memory_bytes=[300] * STAGES,
        host_bytes_per_ms=50,
    )
    schedule = searched(costs, STAGES, MICRO_BATCHES, Effort(0.1, 2)).program.schedule
    assert "O" in schedule.table.letters
    (tmp_path / "S.txt").write_text(str(schedule))
    stock = {"stages": STAGES, "config": {}}
    ours = stock | {"config": {"evenpipe": {"schedule": "file:S.txt", "swap": 1}}}
    (theirs, mine), said = run_cases("train_tiny.py", [stock, ours], tmp_path)
    assert "evenpipe: stage 0 keeps " in said
    for one, other in zip(theirs, mine, strict=True):
        assert other["engine"] == "EvenPipeEngine"
        assert (other["losses"], other["weights"]) == (one["losses"], one["weights"])
