"""A run goes on from a checkpoint as if it had not stopped, whoever saved it and whoever loads it."""

import pytest

from tests.megatron_lm.launch import LAYOUTS, differences, gpt_flags, launch

SCRIPT = "pretrain_gpt.py"
STOPS, ENDS = 2, 4


@pytest.mark.parametrize(
    ("format_", "layout"),
    [
        pytest.param("torch", "PP4", marks=pytest.mark.long),
        pytest.param("torch_dist", "PP4", marks=pytest.mark.every_release),
        pytest.param("torch_dist", "DP2xPP4 distributed optimizer", marks=pytest.mark.long),
    ],
)
def test_saved_by_one_and_resumed_by_the_other(megatron_lm, format_, layout, tmp_path):
    processes, parallel = LAYOUTS[layout]
    flags = [*gpt_flags(ENDS), *parallel, "--ckpt-format", format_, "--save-interval", str(STOPS)]

    def train(folder, *more):
        return launch(megatron_lm, SCRIPT, processes, [*flags, "--save", str(tmp_path / folder), *more])

    whole = train("whole")
    ours = train("ours", "--exit-interval", str(STOPS), "--bpipe")
    assert ours.lines == whole.lines[:STOPS]
    assert ours.peak_live[0] == 3
    # Some releases print the mean of two iterations after they resume, so stock's own log is what others are held to.
    stopped = ("--load", str(tmp_path / "whole"), "--ckpt-step", str(STOPS))
    resumed = train("stock-stock", *stopped)
    assert len(resumed.lines) == ENDS - STOPS
    assert train("stock-ours", *stopped, "--bpipe").lines == resumed.lines
    assert train("ours-stock", "--load", str(tmp_path / "ours")).lines == resumed.lines
    last = f"iter_{ENDS:07d}"
    for folder in ("stock-stock", "stock-ours", "ours-stock"):
        assert differences(tmp_path / "whole" / last, tmp_path / folder / last) == [], folder
