"""A run goes on from a checkpoint as if it had not stopped, whoever saved it and whoever loads it."""

import pytest

from tests.megatron_lm.launch import LAYOUTS, differences, gpt_flags, launch

SCRIPT = "pretrain_gpt.py"
BPIPE, HALVES = ("--bpipe",), ("--evenpipe-schedule", "zb-h2")
SEARCHED = ("--evenpipe-schedule", "searched", "--memory-gib", "0.05")
OVERLAPS = "DP2xPP2 distributed optimizer"


@pytest.mark.parametrize(
    ("format_", "layout", "own", "more"),
    [
        pytest.param("torch", "PP4", BPIPE, (), marks=pytest.mark.long),
        pytest.param("torch_dist", "PP4", BPIPE, (), marks=pytest.mark.every_release),
        pytest.param("torch_dist", "DP2xPP4 distributed optimizer", BPIPE, (), marks=pytest.mark.long),
        pytest.param("torch_dist", OVERLAPS, HALVES, ("--bf16",), marks=pytest.mark.long),
        pytest.param("torch_dist", "PP4", SEARCHED, ("--bf16",), marks=[pytest.mark.long, pytest.mark.every_release]),
    ],
)
def test_saved_by_one_and_resumed_by_the_other(megatron_lm, format_, layout, own, more, tmp_path):
    searched = own == SEARCHED
    stops = 3 if searched else 2  # the third iteration is the first by an order that is searched
    ends = 2 * stops
    processes, parallel = LAYOUTS[layout]
    flags = [*gpt_flags(ends), *parallel, *more, "--ckpt-format", format_, "--save-interval", str(stops)]

    def train(folder, *others):
        return launch(megatron_lm, SCRIPT, processes, [*flags, "--save", str(tmp_path / folder), *others])

    whole = train("whole")
    ours = train("ours", "--exit-interval", str(stops), *own)
    assert ours.lines == whole.lines[:stops]
    if own == BPIPE:
        assert ours.peak_live[0] == 3
    # Some releases print the mean of two iterations after they resume, so stock's own log is what others are held to.
    stopped = ("--load", str(tmp_path / "whole"), "--ckpt-step", str(stops))
    resumed = train("stock-stock", *stopped)
    assert len(resumed.lines) == ends - stops
    assert train("stock-ours", *stopped, *own).lines == resumed.lines
    assert train("ours-stock", "--load", str(tmp_path / "ours")).lines == resumed.lines
    if searched:
        again = train("ours-ours", "--load", str(tmp_path / "ours"), *own)
        assert again.lines == resumed.lines
        assert "trains by the order that was saved" in again.output
    last = f"iter_{ends:07d}"
    for folder in ("stock-stock", "stock-ours", "ours-stock", *(("ours-ours",) if searched else ())):
        assert differences(tmp_path / "whole" / last, tmp_path / folder / last) == [], folder
