"""A run that changes k and b between iterations trains as 1F1B does, in the memory that was predicted."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parent))
from schedule_cases import LIMIT_BYTES, MICRO_BATCHES, SAME, SIZE, STAGES, TURNS

from tests.reports import MEGATRON, reports

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA"),
]
SAMPLES = SIZE * MICRO_BATCHES


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote down."""
    folder = tmp_path_factory.mktemp("adaptive")
    script = Path(__file__).with_name("schedule_cases.py")
    found = reports(script, folder, STAGES, imports=MEGATRON)
    assert not [report["failure"] for report in found if "failure" in report]
    return found


def mean_losses(ranks: list[dict[str, Any]], case: str) -> list[float]:
    iterations = ranks[-1][case]["losses"]
    return [sum(map(float.fromhex, losses)) / len(losses) for losses in iterations]


def test_with_the_loaders_size_nothing_changes(ranks):
    """Bit for bit, and with dropout: a dry run leaves no trace, and neither does another k."""
    for report in ranks:
        assert report["same size, dropout"]["losses"] == report["1f1b, dropout"]["losses"]
        assert report["same size, dropout"]["weights"] == report["1f1b, dropout"]["weights"]
        assert [tuple(pair) for pair in report["same size, dropout"]["decided"]] == list(SAME)


def test_with_other_sizes_the_same_samples_are_trained_on(ranks):
    stock, switched = mean_losses(ranks, "1f1b"), mean_losses(ranks, "switching")
    assert switched == pytest.approx(stock, rel=2e-6)
    assert [tuple(pair) for pair in ranks[0]["switching"]["decided"]] == list(TURNS)
    assert [held["micro_batches"] for held in ranks[-1]["switching"]["held"]] == [SAMPLES // b for _, b in TURNS]
    # The first iterations in the loader's size are equal in every bit.
    assert ranks[-1]["switching"]["losses"][:2] == ranks[-1]["1f1b"]["losses"][:2]


def test_bpipe_changes_nothing(ranks):
    for report in ranks:
        assert report["switching, bpipe"]["losses"] == report["switching"]["losses"]
        assert report["switching, bpipe"]["weights"] == report["switching"]["weights"]
    # Micro-batches of three sizes have been evicted.
    evicting = {
        b for held, (_, b) in zip(ranks[0]["switching, bpipe"]["held"], TURNS, strict=True) if held["evicted_bytes"]
    }
    assert evicting >= {1, 2}


@pytest.mark.parametrize("case", ["switching", "switching, bpipe", "same size, dropout"])
def test_peaks_are_as_predicted(ranks, case):
    for report in ranks:
        measured = [held["peak_bytes"] for held in report[case]["held"]]
        assert measured == pytest.approx(report[case]["predicted"], rel=0.02)


def test_a_switch_copies_no_weights_and_opens_no_links(ranks):
    for report in ranks:
        held = report["switching, bpipe"]["held"]
        assert len({tuple(one["channels"]) for one in held}) == 1
        assert len({tuple(one["parameters"]) for one in held}) == 1
        assert [(one["own_bytes"], one["slots"]) for one in held] == [(0, 0)] * len(TURNS)
    # The acceptor's memory is for the present size, not for all there have been.
    pool = [one["pool_bytes"] for one in ranks[-1]["switching, bpipe"]["held"]]
    assert pool[TURNS.index((2, 4))] == 0
    assert pool[-2] == pytest.approx(pool[0], rel=0.01) != 0


def test_what_does_not_fit_is_no_candidate(ranks):
    limited = ranks[0]["limited"]
    assert len(limited["roomy"]) == 16
    assert limited["candidates"] == [[1, 1, 16]]
    for report, predicted in zip(ranks, limited["predicted"], strict=True):
        for held in report["limited"]["held"]:
            assert held["peak_bytes"] <= 1.02 * predicted
            assert held["peak_bytes"] + report["limited"]["static"] <= limited["limit"] < LIMIT_BYTES


def test_nothing_fits(ranks):
    errors = {report["limited"]["error"] for report in ranks}
    assert len(errors) == 1, "all ranks see the same, so that none waits for another"
    error = errors.pop()
    assert error.startswith("PlanError: no micro-batch size fits: stage 0 needs ")
    assert "give at least" in error


def test_a_state_goes_on(ranks):
    for report in ranks:
        resumed = report["resumed"]
        assert all(resumed["kept"].values())
        assert resumed["times"], "stages rehearsed again"
        assert resumed["next"] == [3, 4, 4], "a decision was due, and the next one counts from it"


def test_a_state_of_another_run_is_not_gone_on_with(ranks):
    """It decides anew before its first iteration, which has the number that it has in the run."""
    for report in ranks:
        assert report["resumed"]["anew"] == {"bpipe": [4], "sizes": [4], "memory": [4]}


def test_micro_batches_of_lengths_of_their_own_change_nothing(ranks):
    """Bit for bit: shapes are told in a dry run as in a batch, of which it leaves no trace."""
    for report in ranks:
        found = report["lengths"]
        assert found["kfkb"]["losses"] == found["1f1b"]["losses"]
        assert found["kfkb"]["weights"] == found["1f1b"]["weights"]
        assert found["bpipe"]["losses"] == found["1f1b"]["losses"][:2]
        assert {b for _, b, _ in (*found["kfkb"]["decided"], *found["bpipe"]["decided"])} == {SIZE}


def test_after_a_longer_micro_batch_a_run_goes_on_with_what_fits(ranks):
    found = [report["lengths"]["kfkb"] for report in ranks]
    before, again, longer, after = (k for k, *_ in found[0]["decided"])
    assert before == again == longer > after == 1
    said = "iteration 3: micro-batches save more than all before: groups of more than 1 no longer fit"
    assert found[0]["said"].count(said) == 1
    assert any("iteration 4: k=1, b=2 (was k=" in line for line in found[0]["said"])
    for report in found:
        for held, predicted in zip(report["held"], report["predicted"], strict=True):
            assert held["peak_bytes"] <= 1.02 * predicted
        assert report["held"][-1]["peak_bytes"] + report["static"] <= report["limit"]
