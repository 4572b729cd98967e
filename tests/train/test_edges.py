"""Parts may exchange several tensors, of other shapes at each edge, whole numbers and skip connections among them."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from edges_cases import SCHEDULES, STAGES, outputs, without_a_pipeline

from tests.reports import reports


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote down."""
    folder = tmp_path_factory.mktemp("edges")
    return reports(Path(__file__).with_name("edges_cases.py"), folder, STAGES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_loss_and_gradients_are_those_without_a_pipeline(ranks: list[dict[str, Any]], name: str) -> None:
    chunks, _, bpipe = SCHEDULES[name]
    loss, gradients = without_a_pipeline(STAGES * chunks)
    assert [rank[name]["loss"] for rank in ranks if rank[name]["loss"] is not None] == [loss]
    found = {int(position): of_part for rank in ranks for position, of_part in rank[name]["gradients"].items()}
    assert [found[position] for position in range(STAGES * chunks)] == gradients
    assert (ranks[0][name]["evicted"] > 0) == bpipe
    assert (ranks[0][name]["swapped"] > 0) == name.endswith("swapped")


def test_a_drained_stream_lets_go_of_the_batch_ahead(ranks: list[dict[str, Any]]) -> None:
    assert [rank["drained"] for rank in ranks] == [[3, 0], [2, 0], [1, 0], [0, 0]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_evaluation_has_the_models_loss_and_outputs_under_any_schedule(
    ranks: list[dict[str, Any]], name: str
) -> None:
    parts = STAGES * SCHEDULES[name][0]
    found = [rank[name] for rank in ranks]
    assert [one["evaluated"] for one in found if one["evaluated"] is not None] == [without_a_pipeline(parts)[0]]
    assert [one["outputs"] for one in found if one["outputs"] is not None] == [outputs(parts)]
    assert all(one["alike"] for one in found)
    [(weighed, of_two)] = [one["weighed"] for one in found if one["weighed"] is not None]
    assert weighed == pytest.approx(of_two)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_without_gradients_names_what_to_call(ranks: list[dict[str, Any]], name: str) -> None:
    said = "step under torch.no_grad trains nothing: call evaluate, or step outside of it"
    assert {rank[name]["refused"] for rank in ranks} == {said}
