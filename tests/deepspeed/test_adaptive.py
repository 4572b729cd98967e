"""Group sizes that real DeepSpeed engines choose, and choose again, while they train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from evenpipe.schedule import Schedule
from tests.deepspeed.job import run_cases

pytest.importorskip("deepspeed")

_AUTO = {"schedule": "kfkb", "group_size": "auto", "memory_gib": 0.01, "retune_interval": 1}
_ZERO = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
_GROUPS = {
    "stock": {"case": {"stages": 4, "config": {}, "steps": 5}, "changes": 4},
    "groups, bpipe": {
        "case": {"stages": 4, "config": {"evenpipe": {**_AUTO, "bpipe": True}}, "steps": 5},
        "turns": [(2, 2), (4, 2), (1, 2)],
        "loader": True,
        "changes": 4,
    },
}
_DIFFERENT = {
    "stock": {"case": {"stages": 4, "config": {}, "steps": 5, "dynamic": True}},
    "lengths": {
        "case": {
            "stages": 4,
            "config": {"evenpipe": {**_AUTO, "memory_gib": 0.00145, "bpipe": True}},
            "steps": 5,
            "dynamic": True,
        },
        "turns": [(2, 2), (4, 2), (1, 2), (2, 2)],
    },
}
_SEARCHED = {"evenpipe": {"schedule": "searched", "memory_gib": 0.01}}
_SEARCHES: dict[str, Any] = {
    "searched": {"case": {"stages": 4, "config": _SEARCHED, "steps": 5}, "changes": 4},
    "searched, short of memory": {
        "case": {"stages": 4, "config": _SEARCHED, "steps": 5},
        "even": "peer_bytes_per_ms",
    },
    "searched, swaps": {
        "case": {"stages": 4, "config": {"evenpipe": {**_SEARCHED["evenpipe"], "swap": 1}}, "steps": 5},
        "even": "host_bytes_per_ms",
    },
    "searched, resumed": {"case": {"stages": 2, "config": {**_ZERO, **_SEARCHED}, "steps": 3}},
}
_STOCK_GIB = 0.00084
_CHOSEN = {"schedule": "auto"}
_CHOICES: dict[str, Any] = {
    "auto": {
        "case": {"stages": 4, "config": {"evenpipe": {**_CHOSEN, "memory_gib": 0.7 * _STOCK_GIB}}, "steps": 5},
        "changes": 4,
    },
    "auto, as given": {
        "case": {"stages": 4, "config": {"evenpipe": {**_CHOSEN, "memory_gib": 1}}, "steps": 5},
        "choices": ["1f1b with BPipe", "kfkb in groups of 2"],
        "changes": 4,
    },
    "auto, resumed": {"case": {"stages": 2, "config": {**_ZERO, "evenpipe": {**_CHOSEN, "memory_gib": 1}}, "steps": 3}},
    "auto, nothing fits": {
        "case": {"stages": 4, "config": {"evenpipe": {**_CHOSEN, "memory_gib": 0.0005}}},
        "said": True,
    },
}
_CUT = {**_AUTO, "micro_batch_size": "auto"}
_FEW = {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}
_SIZES = {
    "stock": {"case": {"stages": 2, "config": _FEW, "steps": 11, "tied": True, "evaluate": True}},
    "sizes": {
        "case": {"stages": 2, "config": {**_FEW, "evenpipe": _CUT}, "steps": 11, "tied": True, "evaluate": True},
        "turns": [(1, 8), (2, 4), (1, 8)],
    },
}
_SMALL = {"stages": 4, "config": {"evenpipe": {**_CUT, "memory_gib": 0.0001}}}
_ENDED: dict[str, Any] = {"nothing fits": {"case": _SMALL, "said": True}}
_RESUMED = {"case": {"stages": 2, "config": {**_ZERO, "evenpipe": {**_AUTO, "retune_interval": 3}}, "steps": 3}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs, in one job of four processes: two replicas where there are two stages."""
    folder: Path = tmp_path_factory.mktemp("adaptive")
    _SEARCHES["searched, resumed"]["folder"] = str(folder / "searched")
    _CHOICES["auto, resumed"]["folder"] = str(folder / "auto")
    resumed = {"resumed": {**_RESUMED, "folder": str(folder / "checkpoint")}}
    given = [_GROUPS, _DIFFERENT, _SIZES, _ENDED, resumed, _SEARCHES, _CHOICES]
    found, said = run_cases("train_adaptive.py", [run for runs in given for run in runs.values()], folder)
    names = [
        *_GROUPS,
        *(f"differ, {name}" for name in _DIFFERENT),
        *(f"cut, {name}" for name in _SIZES),
        *_ENDED,
        "resumed",
        *_SEARCHES,
        *_CHOICES,
    ]
    return dict(zip(names, found, strict=True)) | {"said": said}


def test_groups_are_tuned_to_the_losses_and_weights_of_the_stock_engine(results: dict[str, Any]) -> None:
    stock = results["stock"]
    ours, turns = results["groups, bpipe"], _GROUPS["groups, bpipe"]["turns"]
    assert {rank["engine"] for rank in ours} == {"AdaptiveEngine"}
    for rank, of_stock in zip(ours, stock, strict=True):
        assert rank["losses"] == of_stock["losses"]
        assert rank["weights"] == of_stock["weights"]
        # The first batch was measured, and the next one decided for.
        assert [(k, b) for _, k, b in rank["retunes"]] == [*turns, *turns][:4]
        assert [iteration for iteration, _, _ in rank["retunes"]] == [1, 2, 3, 4]
        assert rank["left"] == 0


def test_no_stage_holds_more_than_was_predicted(results: dict[str, Any]) -> None:
    for name in ("groups, bpipe", "cut, sizes", "differ, lengths"):
        for rank in results[name]:
            # What is predicted counts inputs and outputs that the engine keeps, which autograd does not.
            assert 0.8 * rank["predicted"] <= rank["peak_bytes"] <= rank["predicted"], (name, rank)


def test_where_lengths_differ_the_largest_so_far_says_which_groups_fit(results: dict[str, Any]) -> None:
    for rank, of_stock in zip(results["differ, lengths"], results["differ, stock"], strict=True):
        assert rank["losses"] == of_stock["losses"]
        assert rank["weights"] == of_stock["weights"]
        assert [(k, b) for _, k, b in rank["retunes"]] == _DIFFERENT["lengths"]["turns"]
        assert rank["left"] == 0
        assert rank["refused"].startswith('evenpipe.micro_batch_size: "auto": samples of PipelineModule(dynamic_shape')
    # The third batch has longer ones.
    lines = [line for line in results["said"].splitlines() if "than all before" in line]
    assert len(lines) == 1
    assert re.fullmatch(
        r"evenpipe: iteration 3: micro-batches save more than all before: groups of more than 2 no longer fit",
        lines[0],
    )


def test_batches_are_cut_into_other_micro_batches_with_the_same_samples(results: dict[str, Any]) -> None:
    stock, ours = results["cut, stock"], results["cut, sizes"]
    for rank, of_stock in zip(ours, stock, strict=True):
        for kind in ("losses", "evaluated"):
            wanted = [float.fromhex(loss) for loss in of_stock[kind]]
            assert [float.fromhex(loss) for loss in rank[kind]] == pytest.approx(wanted, rel=2e-6)
        assert len({b for _, _, b in rank["retunes"]}) == 2
        assert rank["size"] == of_stock["size"] == [2, 4, 4]


def test_a_resumed_run_goes_on_tuning(results: dict[str, Any]) -> None:
    for rank in results["resumed"]:
        resumed = rank["resumed"]
        assert [iteration for iteration, _, _ in rank["retunes"]] == [1]
        # Decided before the second batch; the state says that the next time is three later, before the fifth.
        assert [iteration for iteration, _, _ in resumed["retunes"]] == [4]
        assert resumed["client_state"]["mine"] == 7
        assert "evenpipe_tuner" not in resumed["client_state"]
        assert resumed["size"] == [2, 8, 8]
    assert 'evenpipe: group_size "auto": goes on tuning as it was saved' in results["said"]
    assert results["said"].count("evenpipe: iteration 2: k=") == 3


def test_another_batch_size_is_measured_and_chosen_for_anew(results: dict[str, Any]) -> None:
    for rank, of_stock in zip(results["groups, bpipe"], results["stock"], strict=True):
        assert rank["changed"]["losses"] == of_stock["changed"]["losses"]
        assert rank["changed"]["weights"] == of_stock["changed"]["weights"]
        # After one batch in groups of one.
        assert [iteration for iteration, _, _ in rank["changed"]["retunes"]] == [6]
        assert rank["changed"]["size"] == [2, 4, 4]


def test_a_limit_that_nothing_fits_into_ends_the_job(results: dict[str, Any]) -> None:
    for rank in results["nothing fits"]:
        assert rank["said"].startswith("evenpipe.memory_gib: 0.0001: no micro-batch size fits: stage ")
        assert "GiB" in rank["said"]


def test_an_order_is_searched_and_trains_to_the_bits_of_the_stock_engine(results: dict[str, Any]) -> None:
    """Two batches are looked at; the later ones, and those of another number of micro-batches, have orders."""
    state = results["searched"][0]["state"]
    assert len(state["orders"]) == 1
    assert len(results["searched"][0]["changed"]["state"]["orders"]) == 2
    for rank, of_stock in zip(results["searched"], results["stock"], strict=True):
        assert rank["engine"] == "SearchedEngine"
        assert rank["state"] == state
        for ours, stock in ((rank, of_stock), (rank["changed"], of_stock["changed"])):
            assert ours["losses"] == stock["losses"]
            assert ours["weights"] == stock["weights"]
        assert rank["left"] == 0
        assert rank["peak_bytes"] <= state["costs"]["memory_bytes"][rank["stage"]]
    for part in state["costs"]["parts"]:
        assert 0 < part["freed_by_input_gradient_bytes"] < part["saved_bytes"]


def test_an_order_that_a_run_searches_swaps_where_it_may(results: dict[str, Any]) -> None:
    found = results["searched, swaps"]
    assert found[0]["state"]["costs"]["host_bytes_per_ms"] > 0
    assert found[0]["swapped"] > 0
    for rank, of_stock in zip(found, results["stock"], strict=True):
        assert rank["evicted"] == 0
        assert rank["losses"] == of_stock["losses"]
        assert rank["weights"] == of_stock["weights"]
        assert rank["left"] == 0


def test_an_order_that_a_run_searches_evicts_where_its_memory_is_short(results: dict[str, Any]) -> None:
    """Two batches are looked at, three follow the order; the bytes that leave are those that were found to be free."""
    found = results["searched, short of memory"]
    part = found[0]["state"]["costs"]["parts"][0]
    assert found[0]["state"]["costs"]["peer_bytes_per_ms"] > 0
    assert 0 < part["staying_bytes"] < 0.1 * part["saved_bytes"]
    [order] = map(Schedule.parse, found[0]["state"]["orders"])
    assert found[0]["evicted"] == 3 * order.evictions[0] * (part["saved_bytes"] - part["staying_bytes"]) > 0
    for rank, of_stock in zip(found, results["stock"], strict=True):
        assert rank["losses"] == of_stock["losses"]
        assert rank["weights"] == of_stock["weights"]
        assert rank["left"] == 0


def test_a_resumed_run_trains_by_the_order_that_was_saved(results: dict[str, Any]) -> None:
    for rank in results["searched, resumed"]:
        assert rank["loaded"] == rank["state"]
        assert len(rank["state"]["orders"]) == 1
        assert rank["resumed"]["client_state"]["mine"] == 7
        assert "evenpipe_searched" not in rank["resumed"]["client_state"]
    assert "evenpipe: searched: trains by the order that was saved" in results["said"]


def test_a_choice_may_evict_to_partners(results: dict[str, Any]) -> None:
    """Both numbers of micro-batches, one after the other."""
    for rank, of_stock in zip(results["auto, as given"], results["stock"], strict=True):
        orders = rank["changed"]["state"]["orders"]
        assert [Schedule.parse(order).name for order in orders] == ["1f1b", "kfkb"]
        assert [any(Schedule.parse(order).evictions) for order in orders] == [True, False]
        for ours, stock in ((rank, of_stock), (rank["changed"], of_stock["changed"])):
            assert ours["losses"] == stock["losses"]
            assert ours["weights"] == stock["weights"]
        assert rank["left"] == 0
    assert "auto: 8 micro-batches: 1f1b with BPipe: " in results["said"]


def test_a_schedule_is_chosen_that_fits_and_trains_to_the_bits_of_the_stock_engine(results: dict[str, Any]) -> None:
    """Less than stock needs; more than half of that are weights and optimizer, in these runs."""
    found = results["auto"]
    state = found[0]["state"]
    assert len(state["orders"]) == 1
    for rank, of_stock in zip(found, results["stock"], strict=True):
        assert rank["engine"] == "ChoosingEngine"
        assert rank["state"] == state
        for ours, stock in ((rank, of_stock), (rank["changed"], of_stock["changed"])):
            assert ours["losses"] == stock["losses"]
            assert ours["weights"] == stock["weights"]
        assert rank["left"] == 0
        assert rank["peak_bytes"] <= 1.02 * state["costs"]["memory_bytes"][rank["stage"]]
    assert re.search(
        r"evenpipe: auto: 8 micro-batches: [^:]+: [\d.]+ ms an iteration, [\d.]+ MiB on stage \d, of", results["said"]
    )


def test_a_resumed_run_keeps_its_schedule(results: dict[str, Any]) -> None:
    for rank in results["auto, resumed"]:
        assert rank["loaded"] == {name: value for name, value in rank["state"].items() if name != "settings"}
        assert rank["resumed"]["state"]["orders"] == rank["state"]["orders"]
        assert "evenpipe_auto" not in rank["resumed"]["client_state"]
    assert "evenpipe: auto: trains by the schedule that was chosen" in results["said"]


def test_memory_that_holds_no_schedule_ends_the_job(results: dict[str, Any]) -> None:
    for rank in results["auto, nothing fits"]:
        assert re.fullmatch(
            r"evenpipe.memory_gib: 0.0005: no schedule fits: stage \d holds .* for one micro-batch: give at least "
            r"0.0\d+ GiB, or use PipelineModule\(activation_checkpoint_interval=1\), .*",
            rank["said"],
        )
