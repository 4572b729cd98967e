"""What loops of torch.distributed.pipelining do, they can do with a ModulePipeline: results are the uncut model's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_cases import CASES, LIMIT, STAGES

from tests.reports import reports

PLAIN = [name for name, (_, compiles) in CASES.items() if not compiles]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote down."""
    folder = tmp_path_factory.mktemp("loop")
    return reports(Path(__file__).with_name("loop_cases.py"), folder, STAGES)


@pytest.mark.parametrize("name", CASES)
def test_keywords_reach_the_parts_that_take_them_and_shapes_are_found(ranks: list[dict[str, Any]], name: str) -> None:
    """With compiled parts and split backwards too. The micro-batch that shapes are found with leaves no trace."""
    [losses] = [rank[name]["loss"] for rank in ranks if rank[name]["loss"] is not None]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert max(rank[name]["gradients"] for rank in ranks) < 1e-5
    assert max(rank[name]["buffers"] for rank in ranks) < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_the_second_half_alone_gives_linear_weights_their_gradients_compiled_or_not(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        assert rank[name]["before W"] == ([] if name == "1f1b" else [0])


@pytest.mark.parametrize("name", CASES)
def test_one_norm_over_all_stages_clips_as_torch_does(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        mine, theirs = rank[name]["norms"]
        assert mine == pytest.approx(theirs, rel=1e-6)
        assert mine > LIMIT
        assert rank[name]["clipped"] < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_the_gathered_state_is_the_uncut_models(ranks: list[dict[str, Any]], name: str) -> None:
    assert ranks[0][name]["whole"][0]
    assert ranks[0][name]["whole"][1] < 1e-6
    assert [rank[name]["whole"] for rank in ranks[1:]] == [None] * 3


@pytest.mark.parametrize("name", PLAIN)
def test_states_are_saved_by_stage_and_loaded_by_the_uncut_models_names(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[name]["sharded"] < 1e-6
        assert rank[name]["loaded"] == 0
        assert rank[name]["other"].startswith("1.linear.wieght: no stage has it: did you mean 1.linear.weight?")
    assert "bias: is not in the state to load: give the uncut model's" in ranks[1][name]["short"]


@pytest.mark.parametrize("name", PLAIN)
def test_an_overflow_on_one_stage_is_skipped_on_all(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[name]["scaled"]
        assert found["skipped"]
        assert found["scales"] == [[2.0**9, 2.0**9], [2.0**10, 2.0**10]]
        assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-6)
        assert found["off"] < 1e-4


def test_fp16_under_2bw_skips_on_all_stages_and_changes_the_scale_as_one_process_does(
    ranks: list[dict[str, Any]],
) -> None:
    found = ranks[0]["streamed"]["right"]
    assert found["scales"]
    assert found["weights"]
    assert found["skipped"][0]
    assert found["skipped"][5]
    assert not all(found["skipped"])
    assert all(rank["streamed"]["scales"] == ranks[0]["streamed"]["scales"] for rank in ranks)


def test_what_cannot_be_is_one_line_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name in CASES:
            assert rank[name]["mistyped"] == "mosk: no part of the model takes it by name: did you mean mask?"
        assert rank["failing"].startswith("part 2 of the model fails on a micro-batch: RuntimeError: mat1 and mat2")
        assert rank["twice"] == "names: 'weight' is of several parameters: give each its own name of the uncut model"
        assert rank["streamed"]["called"].startswith("2bw: two_bw unscales the gradients and steps: leave step and")
        assert rank["streamed"]["half"].startswith("2bw: gradients in fp16 cannot be unscaled: keep parameters in fp32")


def test_a_group_size_is_chosen_while_training_and_changes_no_loss(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["tuned"]
        assert found["alike"]
        assert found["sizes"] == ranks[0]["tuned"]["sizes"]
        assert found["sizes"][0] == 1  # which is measured
        assert {*found["sizes"]} <= {*found["candidates"]}
        assert found["candidates"] == [*range(1, 9)]
        assert found["decided"] == [1, 3]
        assert found["resumed"] == 6
        assert found["ungrouped"].startswith("program: 1f1b groups no micro-batches")
        assert found["unlimited"].startswith("memory_gib: how much may a process hold?")
        assert found["swapping"].startswith("swap: memory is measured without swaps")
        assert "fits" in found["small"]
