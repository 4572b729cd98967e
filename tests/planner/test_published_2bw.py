"""What PipeDream-2BW's paper says of throughput's order and of who runs out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.pipedream import figure_8_gib, figure_11_billion, largest_micro_batch, table_1
from benchmarks.published.two_bw import QUALITY, SHARE
from evenpipe.planner.descriptions import device
from evenpipe.planner.run import ITERATIONS_WITH_LATE_GRADIENTS

HAVE = device("v100-16gb").memory_gib
#: The papers' texts, which are not part of the repository.
TEXTS = Path(__file__).parents[3] / "shared" / "seeds"


@pytest.mark.skipif(not TEXTS.exists(), reason="the papers' texts are not beside this checkout")
@pytest.mark.parametrize("name", QUALITY)
def test_a_passage_of_its_quality_is_in_the_paper_s_line(name: str) -> None:
    [path] = TEXTS.glob("002_*.txt")
    line = path.read_text(encoding="utf-8").splitlines()[QUALITY[name].line - 1]
    assert QUALITY[name].text in " ".join(line.split())


def test_the_planner_counts_as_many_iterations_as_the_paper_says() -> None:
    assert pytest.approx(1 / SHARE) == ITERATIONS_WITH_LATE_GRADIENTS


@pytest.mark.long
def test_table_1_s_checked_row_wins_and_all_are_in_order() -> None:
    groups = table_1()
    checked = {(8, 2, 8, False), (8, 4, 4, True), (8, 8, 1, True), (4, 16, 1, True)}
    assert len(groups) == 4
    for group in groups:
        assert group.ordered
        assert max(group.rows, key=lambda row: row[2])[0] in checked
    assert sum(len(group.rows) for group in groups) == 9  # of ten: (4, 16) is not on 32 GPUs


@pytest.mark.parametrize("name", ["gpt2-2.2b", "bert-2.2b"])
def test_figure_8_gpipe_runs_out_of_memory_for_gpt_and_not_for_bert(name: str) -> None:
    gib = figure_8_gib(name)
    assert (gib["gpipe"] > HAVE) == (name == "gpt2-2.2b")
    assert gib["inter-layer"] <= gib["flush"] < gib["2bw"] < min(gib["gpipe"], HAVE)


def test_figure_9_deeper_pipelines_take_larger_micro_batches() -> None:
    assert largest_micro_batch("gpt2-1.3b", 4, 16, True) < largest_micro_batch("gpt2-1.3b", 8, 8, True)
    assert largest_micro_batch("gpt2-1.3b", 8, 8, True) >= 32  # which ran


def test_figure_10_recomputation_takes_larger_micro_batches_and_more_so_for_larger_models() -> None:
    gains = []
    for name in ("gpt2-1.3b", "gpt2-2.2b"):
        without, recomputed = (largest_micro_batch(name, 8, 1, again) for again in (False, True))
        gains.append(recomputed / without)
    assert 1 < gains[0] < gains[1]


@pytest.mark.long
def test_figure_11_about_30_billion_parameters_train_on_64_gpus_of_16_gb() -> None:
    assert figure_11_billion(64) == pytest.approx(30, rel=0.1)
    assert figure_11_billion(16) < figure_11_billion(32) < figure_11_billion(64)
