"""A cut model under what its users wrap around `step`: right, or refused in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.reports import reports

STAGES = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote down."""
    return reports(Path(__file__).with_name("uses_cases.py"), tmp_path_factory.mktemp("uses"), STAGES)


def together(ranks: list[dict[str, Any]], case: str, of: str = "cut") -> dict[str, Any]:
    """The stages' losses and gradients as one model's."""
    found = [rank[case][of] for rank in ranks]
    return {
        "losses": [loss for one in found for loss in one["losses"]],
        "gradients": {name: gradient for one in found for name, gradient in one["gradients"].items()},
    }


def test_under_autocast_a_plan_that_is_traced_under_it_trains_as_the_uncut_model(ranks: list[dict[str, Any]]) -> None:
    assert together(ranks, "autocast") == ranks[0]["autocast"]["uncut"]


def test_under_autocast_a_plan_that_is_traced_without_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["autocast"]["refused"] == (
        "step is called under torch.autocast of bf16, and the plan was made under no torch.autocast: trace the model "
        "and train it alike"
    )


def test_an_argument_that_the_model_was_not_traced_with_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["keys"] == {
        "refused": "batch['attention_msk']: the plan's model has no such input, it was traced with x, unread: leave it "
        "out, or make a plan with it",
        "accepted": 4,
    }


def test_memory_of_the_host_for_swaps_is_there_from_the_start(ranks: list[dict[str, Any]]) -> None:
    """Two micro-batches are between forward and backward on the first stage, which alone swaps."""
    assert together(ranks, "swapped") == ranks[0]["swapped"]["uncut"]
    sizes = ranks[0]["swapped"]["sizes"]
    half = len(sizes) // 2
    assert sizes
    assert sizes[:half] == sizes[half:]
    held = sum(-(-size // 64) * 64 for size in sizes)
    assert [rank["swapped"]["held"] for rank in ranks] == [[held, held], [0, 0]]
    said = f"stage 0 keeps {held / 2**20:.1f} MiB of its host's memory, pinned, for what it swaps"
    assert [rank["swapped"]["said"] for rank in ranks] == [[said], []]


def test_a_host_with_less_than_swaps_take_is_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert re.fullmatch(
            r".*/swapped\.json: swaps take 0\.0 GiB of memory of the host \S+, which has 0\.0 GiB free: make a plan "
            "with --optimize recompute, or have fewer processes on a host",
            rank["swapped"]["refused"],
        )


def test_swaps_of_all_replicas_on_a_host_add_up(ranks: list[dict[str, Any]]) -> None:
    """The host has memory for one of two."""
    for rank in ranks:
        assert rank["replicated"]["alone"] == "nothing"
        assert re.match(r"--partition .*/alone\.json: swaps take 0\.0 GiB of memory", rank["replicated"]["both"])


@pytest.mark.parametrize("case", ["frozen", "partly"])
def test_floats_without_gradient_travel_and_train_as_without_a_pipeline(ranks: list[dict[str, Any]], case: str) -> None:
    assert together(ranks, case) == ranks[0][case]["uncut"]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_an_evaluation_is_the_uncut_models_without_dropout(ranks: list[dict[str, Any]], schedule: str) -> None:
    """Before a step and after it; what the model returns is on the stage that computes it."""
    found, uncut = [rank[schedule]["cut"] for rank in ranks], ranks[0][schedule]["uncut"]
    for cut, whole in zip(zip(*found, strict=True), uncut, strict=True):
        together = {name: one for of_stage in cut for name, one in of_stage.items() if one is not None}
        assert together == whole


def test_each_stage_makes_its_own_tensors_alone_of_a_model_on_the_meta_device(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["placed"]
        assert found["state"] == found["files"] == found["real"]
        assert set(found["taken"]) == set(found["own"]) - {"scale"}
        assert len(found["taken"]) == len(set(found["taken"]))
        assert found["meta"]
    assert set(ranks[0]["placed"]["own"]) != set(ranks[1]["placed"]["own"])


def test_values_that_nobody_gives_are_named(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["placed"]["refused"].endswith(
        "buffered.json: the model is on the meta device: give device=, and state= for its values"
    )
    assert ranks[1]["placed"]["lacks"] == "state: has no 'shift': give the state of the plan's model"


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b with BPipe", "zb-h1"])
def test_a_frozen_start_is_cut_and_trains_as_without_a_pipeline(ranks: list[dict[str, Any]], schedule: str) -> None:
    """Every node takes as long as every other, so that the cut is among the frozen three quarters."""
    case = f"cut {schedule}"
    assert ranks[0][case]["cut"]["gradients"] == {}
    assert together(ranks, case) == ranks[0][case]["uncut"]


def test_a_frozen_start_is_cut_without_flushes_too(ranks: list[dict[str, Any]]) -> None:
    first, last = (rank["cut 2bw"] for rank in ranks)
    assert (first["learned"], first["losses"]) == (0, [None] * 3)
    assert last["losses"][2] < last["losses"][0]


@pytest.mark.parametrize("case", ["meant", "divided"])
def test_weighed_by_tokens_a_batch_trains_as_the_uncut_model_on_the_whole_of_it(
    ranks: list[dict[str, Any]], case: str
) -> None:
    """One micro-batch has no token at all, so that its own mean is no number."""
    cut, uncut = together(ranks, case), ranks[0][case]["uncut"]
    assert cut["losses"] == pytest.approx(uncut["losses"], rel=1e-6)
    assert cut["gradients"].keys() == uncut["gradients"].keys()
    for name, gradient in uncut["gradients"].items():
        assert cut["gradients"][name] == pytest.approx(gradient, rel=1e-5, abs=1e-7), name
    assert all(rank[case]["evaluated"] for rank in ranks)


def test_two_counts_of_tokens_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["divided"]["refused"] == (
        "tokens: num_items_in_batch of the batch weighs its loss already: give one of them"
    )
    assert ranks[0]["meant"]["refused"] == (
        "batch['num_items_in_batch']: the plan's model has no such input, it was traced with x, labels: leave it out, "
        "or make a plan with it, or give tokens= in its place"
    )
