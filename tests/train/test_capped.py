"""A pipeline of plain modules swaps as little as keeps each stage under a cap."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from capped_cases import PARTNERS, RESUMED, SCHEDULES, SLOW_HOST, STAGES

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


def test_a_plan_that_was_saved_counts_from_the_first_batch_on_under_the_same_cap(ranks: list[dict[str, Any]]) -> None:
    """Also where rank 0 alone has it."""
    lines = ranks[0]["resumed said"]
    assert lines[0] == "swap auto: trains by the plan that was saved"
    assert lines[1] == "swap auto: what was saved is of another cap, schedule or size: measures again"
    assert len(lines) == 3
    for rank in ranks:
        plain, before, peak = rank[RESUMED][""], rank[RESUMED]["0.9"], rank[RESUMED]["peak"]
        for name in ("resumed", "changed"):
            assert (rank[name]["losses"], rank[name]["weights"]) == (plain["losses"], plain["weights"])
        assert rank["resumed"]["counted"] == [before["counted"][-1]] * 3
        assert rank["changed"]["counted"][0] == before["counted"][0]
        assert max(held for held, _ in rank["changed"]["counted"]) <= 1.02 * 0.45 * peak


def test_layers_are_recomputed_where_copies_are_slow(ranks: list[dict[str, Any]]) -> None:
    [line] = {line for rank in ranks for line in rank[SLOW_HOST]["said"]}
    assert re.search(r"swaps of each micro-batch by stage: 0% 0% 0% 0%;", line)
    assert re.search(r"recomputed layers of each chunk by stage: [1-4] [1-4] [1-4] 0;", line)
    for rank in ranks:
        found = rank[SLOW_HOST]
        for capped in ("enough", "0.45"):
            assert (found[capped]["losses"], found[capped]["weights"]) == (found[""]["losses"], found[""]["weights"])
        assert max(held for held, _ in found["0.45"]["counted"][1:]) <= 1.02 * 0.45 * found["peak"]


def test_stages_send_to_their_partners_where_copies_are_slow_and_nothing_can_be_recomputed(
    ranks: list[dict[str, Any]],
) -> None:
    """The first of four stages holds three of four micro-batches, and what stays of the fourth."""
    [line] = {line for rank in ranks for line in rank[PARTNERS]["said"]}
    assert re.search(r"swaps of each micro-batch by stage: 0% 0% 0% 0%;", line)
    assert "; stages that move micro-batches to and from their partners: 0, 3;" in line
    for stage, rank in enumerate(ranks):
        found = rank[PARTNERS]
        for capped in ("enough", "0.85"):
            assert (found[capped]["losses"], found[capped]["weights"]) == (found[""]["losses"], found[""]["weights"])
        assert (found["0.85"]["evicted"] > 0) == (stage == 0)
        assert found["enough"]["evicted"] == 0
        assert max(held for held, _ in found["0.85"]["counted"][1:]) <= 1.02 * 0.85 * found["peak"]


def test_a_stage_that_sends_to_its_partner_says_once_that_it_is_over_its_cap(ranks: list[dict[str, Any]]) -> None:
    said = [[line for line in rank["grown"]["remarks"] if "over its cap" in line] for rank in ranks]
    assert re.match(r"stage 0 is over its cap, with all at its partner that its plan lets leave: ", said[0][0])
    assert len(said[0]) == 1
    for rank in ranks:
        assert not any("over its cap" in line for line in rank[PARTNERS]["0.85"]["remarks"])


def test_memory_for_guests_is_given_back_when_another_plan_has_none(ranks: list[dict[str, Any]]) -> None:
    for stage, rank in enumerate(ranks):
        found, plain = rank["another plan"], rank[PARTNERS][""]
        assert (found["losses"], found["weights"]) == (plain["losses"], plain["weights"])
        assert [nbytes > 0 for nbytes in found["for guests"]] == [stage == 3, stage == 3, False]


def test_what_the_first_batch_pinned_is_given_back(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["1f1b"]["enough"]["pinned"] == 0
        assert rank["1f1b"]["0.45"]["pinned"] == 0 or rank["1f1b"]["0.45"]["counted"][-1][1] > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cap_that_no_swaps_can_keep_is_refused_with_the_least(ranks: list[dict[str, Any]], schedule: str) -> None:
    [line] = {rank[schedule]["refused"] for rank in ranks}
    stage = "3" if schedule == "zb-h1" else "[0-3]"
    assert re.match(rf"no swaps keep stage {stage} under it: it holds [\d.]+ MiB of weights, gradients, ", line)
    assert re.search(r"give at least [\d.]+ GiB, a smaller micro-batch, or recomputation$", line)
