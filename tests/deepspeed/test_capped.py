"""Real DeepSpeed engines that swap as little as keeps each stage under a cap train as stock ones do, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.job import run_cases

pytest.importorskip("deepspeed")

#: Of what the worst stage saves without swaps.
_CAPS = (0.75, 0.45)
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
