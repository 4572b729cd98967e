"""A pipeline of plain modules swaps as little as keeps each stage under a cap."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from capped_cases import SCHEDULES, STAGES

from tests.reports import reports


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process has found."""
    return reports(Path(__file__).with_name("capped_cases.py"), tmp_path_factory.mktemp("capped"), STAGES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_stay_under_a_cap_and_train_to_the_same_bits(ranks: list[dict[str, Any]], schedule: str) -> None:
    caps = SCHEDULES[schedule][1]
    for rank in ranks:
        found = rank[schedule]
        plain, enough, peak = found[""], found["enough"], found["peak"]
        for capped in ("enough", *map(str, caps)):
            assert (found[capped]["losses"], found[capped]["weights"]) == (plain["losses"], plain["weights"])
        assert [swapped for _, swapped in enough["counted"][1:]] == [0, 0]
        for cap in caps:
            for held, swapped in found[str(cap)]["counted"][1:]:
                assert held <= 1.02 * cap * peak
                assert (swapped > 0) == (plain["counted"][-1][0] > cap * peak)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cap_that_no_swaps_can_keep_is_refused_with_the_least(ranks: list[dict[str, Any]], schedule: str) -> None:
    [line] = {rank[schedule]["refused"] for rank in ranks}
    stage = "3" if schedule == "zb-h1" else "[0-3]"
    assert re.match(rf"no swaps keep stage {stage} under it: it holds [\d.]+ MiB of weights, gradients, ", line)
    assert re.search(r"give at least [\d.]+ GiB, a smaller micro-batch, or recomputation$", line)
