"""A model in a V trains to the bits of Megatron's interleaving, on whatever its functions are called with."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parent))
from vee_cases import CASES, LIMIT_BYTES, ORDERS, RECOMPUTED, STATIC_BYTES, UNITS, WORLD

from tests.reports import reports

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = reports(Path(__file__).with_name("vee_cases.py"), tmp_path_factory.mktemp("vee"), WORLD)
    assert not [report["failure"] for report in found if "failure" in report]
    return found


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all that the ranks have, by its place in the model; two ranks with one place have the same there."""
    found: dict[str, Any] = {}
    for rank in ranks:
        for name, value in rank.items():
            assert found.setdefault(name, value) == value, name
    return found


@pytest.mark.parametrize(
    ("name", "order"), [(name, order) for name in CASES for order in ORDERS.get(name, ("v-half",))]
)
def test_losses_gradients_and_weights_are_those_of_interleaved_stages(
    ranks: list[dict[str, Any]], name: str, order: str
) -> None:
    stock, ours = ([rank[name][engine] for rank in ranks] for engine in ("megatron", order))
    for number in range(len(CASES[name].calls)):
        theirs, mine = ([rank["calls"][number] for rank in each] for each in (stock, ours))
        assert [call["losses"] for call in mine] == [call["losses"] for call in theirs]
        assert joined([call["gradients"] for call in mine]) == joined([call["gradients"] for call in theirs])
    assert joined([rank["weights"] for rank in ours]) == joined([rank["weights"] for rank in stock])
    assert len(joined([rank["weights"] for rank in ours])) > 8 * 8


def test_stages_hold_what_a_schedule_says(ranks: list[dict[str, Any]]) -> None:
    """V-Half holds p/2 + 1 micro-batches, V-Min (p + 4)/3, ZB-V p, DualPipeV p + ½; each is two units."""
    held = {"v-half": WORLD // 2 + 1, "v-min": (WORLD + 4) // 3, "zbv": WORLD}
    for order, of_a_stage in held.items():
        assert [rank["tied"][order]["peak"] for rank in ranks] == [2 * of_a_stage] * WORLD
    assert max(rank["tied"]["dualpipev"]["peak"] for rank in ranks) == 2 * WORLD + 1
    for order, units in UNITS.items():
        assert max(rank["searched"][order]["peak"] for rank in ranks) == units


@pytest.mark.parametrize("order", LIMIT_BYTES)
def test_an_order_is_searched_for_what_was_seen_and_keeps_within_the_memory(
    ranks: list[dict[str, Any]], order: str
) -> None:
    """Two batches are measured. Later ones follow an order, one for each number of micro-batches.

    The fullest stage uses three quarters of its memory, of which the first batches use less.
    """
    found = [rank["searched in the run"][order] for rank in ranks]
    assert all(one["state"] == found[0]["state"] and one["lines"] == found[0]["lines"] for one in found)
    said = [line for line in found[0]["lines"] if "searches anew" not in line]
    assert [line.partition(":")[0] for line in said[1::2]] == ["8 micro-batches", "4 micro-batches"]
    assert " order found in " in said[1]
    assert "computed again" in said[1] or order == "searched"
    caps = found[0]["state"]["costs"]["memory_bytes"]
    parts = found[0]["state"]["costs"]["parts"]
    assert caps[0] < LIMIT_BYTES[order] - STATIC_BYTES
    assert all(one["peak bytes"] <= cap for one, cap in zip(found, caps, strict=True))
    assert max(one["peak bytes"] for one in found) > 0.75 * max(caps)
    for part in parts:
        assert 0 < part["freed_by_input_gradient_bytes"] < 0.2 * part["saved_bytes"]
        assert 0 < part["recomputed_bytes"] < 0.3 * part["saved_bytes"]
        assert min(part["forward_ms"], part["input_gradient_ms"], part["weight_gradient_ms"]) > 0


def test_parts_that_are_computed_again_save_less(ranks: list[dict[str, Any]]) -> None:
    """Stage 0 recomputes both of its parts, stage 1 none, stages 2 and 3 one."""
    peaks = {name: [rank["searched"][name]["peak bytes"] for rank in ranks] for name in (RECOMPUTED, "v-min")}
    shares = [again / usual for again, usual in zip(peaks[RECOMPUTED], peaks["v-min"], strict=True)]
    assert shares[1] == 1.0
    assert shares[0] < 0.55
    assert max(shares[2:]) < 0.97


def test_timers_of_a_batch_run_as_megatrons(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        used = {engine: rank["timers"][engine]["timers"]["forward-backward"] for engine in ("megatron", "v-half")}
        assert used["v-half"] == used["megatron"]
        assert used["v-half"]["used"]


def test_a_model_that_was_made_for_interleaved_stages_is_not_trained(ranks: list[dict[str, Any]]) -> None:
    """The middle stages, whose ends are the same, are told by their layers."""
    said = [rank["not placed"] for rank in ranks]
    assert "chunk 1 of stage 0 has no output layer, and in a V it has one" in said[0]
    assert "chunk 1 of stage 1 begins with layer 6, and in a V with 7" in said[1]
    assert "chunk 1 of stage 2 begins with layer 7, and in a V with 6" in said[2]
    assert "chunk 1 of stage 3 has an output layer, and in a V it has none" in said[3]
