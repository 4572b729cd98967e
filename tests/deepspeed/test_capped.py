"""Real DeepSpeed engines that swap as little as keeps each stage under a cap train as stock ones do, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.job import run_cases

pytest.importorskip("deepspeed")

#: Of what the worst stage saves without swaps.
_CAPS = (0.9, 0.75, 0.6, 0.45)
_GIB, _MIB = 2**30, 2**20
_ENOUGH_GIB = 1.0
#: Blocks that save much more than a message has.
_CASE: dict[str, Any] = {"stages": 4, "blocks": 14}


_UNEVEN = {"schedule": "1f1b", "partition": [0, 6, 10, 14, 16]}


def _swapping(gib: float, section: dict[str, Any]) -> dict[str, Any]:
    ours = {**section, "swap": "auto", "memory_gib": gib}
    return {**_CASE, "measure": True, "config": {"evenpipe": ours}}


def _weights(ranks: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {weight for rank in ranks for weight in rank["weights"].items()}


@pytest.mark.parametrize(
    "section",
    [
        {"schedule": "1f1b"},
        pytest.param({"schedule": "gpipe"}, marks=pytest.mark.long),
        pytest.param(_UNEVEN, marks=pytest.mark.long),
    ],
    ids=["1f1b", "gpipe", "uneven partition"],
)
def test_stages_stay_under_their_cap_and_train_to_the_stock_bits(section: dict[str, Any], tmp_path: Path) -> None:
    stocks, ours = str(tmp_path / "stock"), str(tmp_path / "ours")
    (stock, whole, plain, stock_resumed), said = run_cases(
        "train_tiny.py",
        [
            {**_CASE, "config": {}, "save": stocks},
            {**_CASE, "measure": True, "config": {"evenpipe": section}},
            _swapping(_ENOUGH_GIB, section),
            {**_CASE, "config": {}, "load": stocks},
        ],
        tmp_path,
    )
    [rooms] = re.findall(r"evenpipe: swap auto: nothing is swapped, for all fits; .* MiB by stage: ([\d. ]+)", said)
    used = _ENOUGH_GIB * _GIB - min(map(float, rooms.split())) * _MIB  # of the stage with the most weights
    peak = max(rank["peak_bytes"] for rank in whole)
    cases = [_swapping((used + cap * peak) / _GIB, section) for cap in _CAPS]
    (*found, kept, changed), said = run_cases(
        "train_tiny.py",
        [*cases[:-1], {**cases[-1], "save": ours}, {**cases[-1], "load": ours}, {**cases[0], "load": ours}],
        tmp_path,
    )
    assert said.count("evenpipe: swap auto: trains by the plan that was saved") == 1
    assert said.count("evenpipe: swap auto: the checkpoint has no plan for these settings: measures again") == 1
    for resumed in (kept, changed):
        assert [rank["losses"] for rank in resumed] == [rank["losses"] for rank in stock_resumed]
        assert _weights(resumed) == _weights(stock_resumed)
    assert [rank["peak_bytes"] for rank in kept] == [rank["peak_bytes"] for rank in found[-1]]
    for run in (plain, *found):
        assert {rank["engine"] for rank in run} == {"CappedEngine"}
        assert [rank["losses"] for rank in run] == [rank["losses"] for rank in stock]
        assert _weights(run) == _weights(stock)
        assert all(rank["left"] == 0 for rank in run)
    lines = re.findall(r"evenpipe: swap auto: swaps of each micro-batch by stage: [\d% ]+; room [^:]*: ([\d. ]+)", said)
    assert len(lines) == len(_CAPS) + 1
    for cap, run, line in zip(_CAPS, found, lines[:-1], strict=True):
        rooms = sorted(map(float, line.split()))
        assert rooms[0] * _MIB == pytest.approx(cap * peak, rel=0.02)
        for rank in run:
            assert rank["peak_bytes"] <= 1.02 * float(line.split()[rank["stage"]]) * _MIB, (cap, rank["stage"])


def test_layers_are_recomputed_where_copies_are_slow_and_draw_the_same_random_numbers(tmp_path: Path) -> None:
    case = {**_CASE, "dropout": True}
    section = {"schedule": "1f1b"}
    (stock, whole), _ = run_cases(
        "train_tiny.py",
        [{**case, "config": {}}, {**case, "measure": True, "config": {"evenpipe": section}}],
        tmp_path,
    )
    peak = max(rank["peak_bytes"] for rank in whole)
    small = {**case, **_swapping((60 * peak) / _GIB, section), "dropout": True, "slow_host": True}
    [roomy], said = run_cases("train_tiny.py", [small], tmp_path)
    [rooms] = re.findall(r"for all fits; .* MiB by stage: ([\d. ]+)", said)
    used = 60 * peak - min(map(float, rooms.split())) * _MIB
    small["config"]["evenpipe"]["memory_gib"] = (used + 0.5 * peak) / _GIB
    [ours], said = run_cases("train_tiny.py", [small], tmp_path)
    [counts] = re.findall(r"recomputed layers of each chunk by stage: ([\d ]+);", said)
    assert int(counts.split()[0]) > 0
    [shares] = re.findall(r"swaps of each micro-batch by stage: ([\d% ]+);", said)
    assert set(shares.split()) == {"0%"}
    for found in (ours, roomy):
        assert [rank["losses"] for rank in found] == [rank["losses"] for rank in stock]
        assert _weights(found) == _weights(stock)
    assert max(rank["peak_bytes"] for rank in ours) <= 1.02 * 0.5 * peak


def test_stages_send_to_their_partners_where_copies_are_slow_and_nothing_can_be_recomputed(tmp_path: Path) -> None:
    """The first of four stages holds three of four micro-batches, and what stays of the fourth."""
    case = {**_CASE, "slow_host": True, "recomputes": False, "measure": True}
    own = {**_UNEVEN, "bpipe": True, "swap": "auto"}
    (stock, whole, roomy), said = run_cases(
        "train_tiny.py",
        [
            {**case, "config": {}, "measure": False, "slow_host": False, "recomputes": True},
            {**case, "config": {"evenpipe": _UNEVEN}, "slow_host": False, "recomputes": True},
            {**case, "config": {"evenpipe": {**own, "memory_gib": _ENOUGH_GIB}}},
        ],
        tmp_path,
    )
    [rooms] = re.findall(r"for all fits; .* MiB by stage: ([\d. ]+)", said)
    peak = max(rank["peak_bytes"] for rank in whole)
    gib = _ENOUGH_GIB - (min(map(float, rooms.split())) * _MIB - 0.85 * peak) / _GIB
    [ours], said = run_cases("train_tiny.py", [{**case, "config": {"evenpipe": {**own, "memory_gib": gib}}}], tmp_path)
    assert "; stages that move micro-batches to and from their partners: 0, 3" in said
    for found in (ours, roomy):
        assert [rank["losses"] for rank in found] == [rank["losses"] for rank in stock]
        assert _weights(found) == _weights(stock)
    assert [rank["evicted_bytes"] > 0 for rank in ours] == [rank["stage"] == 0 for rank in ours]
    assert max(rank["peak_bytes"] for rank in ours) <= 1.02 * 0.85 * peak


@pytest.mark.parametrize("cap", [0.55, pytest.param(0.75, marks=pytest.mark.long)])
def test_layers_of_experts_stay_under_a_cap(cap: float, tmp_path: Path) -> None:
    """Of what the first of two stages holds, whose routers send each micro-batch's tokens where they like."""
    case = {"config": {}, "steps": 3, "layers": 6}
    swaps = {"schedule": "1f1b", "swap": "auto"}

    def trained(*sections: dict[str, Any] | None) -> tuple[list[dict[str, Any]], str]:
        ranks, said = run_cases("train_experts.py", [{**case, "sections": sections}], tmp_path)
        runs = zip(*(rank["runs"] for rank in ranks[0]), strict=True)
        return [{name: [one[name] for one in of_ranks] for name in of_ranks[0]} for of_ranks in runs], said

    (stock, roomy), said = trained(None, {**swaps, "memory_gib": _ENOUGH_GIB})
    [rooms] = re.findall(r"for all fits; .* MiB by stage: ([\d. ]+)", said)
    peak = max(roomy["peak_bytes"])
    gib = _ENOUGH_GIB - (min(map(float, rooms.split())) * _MIB - cap * peak) / _GIB
    [ours], said = trained({**swaps, "memory_gib": gib})
    assert "swaps of each micro-batch by stage" in said
    for found in (roomy, ours):
        assert (found["losses"], found["weights"]) == (stock["losses"], stock["weights"])
    [rooms] = re.findall(r"room for all of them, MiB: ([\d. ]+)", said)
    by_stage = [float(room) * _MIB for room in rooms.split() for _ in range(2)]  # two replicas of each
    assert min(by_stage) == pytest.approx(cap * peak, rel=0.05)  # MiB have two digits
    assert all(held <= 1.02 * room + 0.005 * _MIB for held, room in zip(ours["peak_bytes"], by_stage, strict=True))
