"""Megatron's timers synchronise around every forward and backward: nothing hangs, and the bits are the same."""

import re
from pathlib import Path

import pytest

from tests.megatron_lm.launch import LAYOUTS, launch, model_flags

SCRIPT = str(Path(__file__).with_name("synchronising_gpt.py"))
ITERATIONS = 3
TIMERS = ("--timing-log-level", "2")


@pytest.mark.parametrize(
    ("stages", "ours", "timers"),
    [
        pytest.param("PP2", ("--evenpipe-schedule", "1f1b"), TIMERS, id="1f1b"),
        pytest.param("PP4", ("--evenpipe-schedule", "kfkb", "--group-size", "2", "--bpipe"), TIMERS, id="2F2B, BPipe"),
        # Timers interrupt its stream; so it is synchronised before every step.
        pytest.param("PP4", ("--evenpipe-schedule", "2bw", "--bpipe"), (), id="2bw, BPipe"),
        pytest.param("PP2", ("--evenpipe-schedule", "2bw", "--train-sync-interval", "1"), (), id="2bw, each batch"),
    ],
)
def test_what_synchronises_changes_nothing(megatron_lm, stages, ours, timers):
    processes, parallel = LAYOUTS[stages]
    flags = [*model_flags(megatron_lm, "pretrain_gpt.py", ITERATIONS, []), *parallel, *ours]
    plain = launch(megatron_lm, "pretrain_gpt.py", processes, flags)
    timed = launch(megatron_lm, SCRIPT, processes, [*flags, *timers])
    assert len(plain.lines) == ITERATIONS
    assert timed.lines == plain.lines
    assert timed.validation == plain.validation
    counted = re.findall(r"SYNCHRONISED (\d+) (many|one|synchronised)", timed.output)
    assert len(counted) == processes
    assert min(int(calls) for calls, _ in counted) > 2 * 8 * ITERATIONS, "before every forward and backward"
    assert {queues for _, queues in counted} == {"synchronised" if timers else "many"}, "what the order goes by"


def test_with_receives_posted_ahead_it_stands_still(megatron_lm):
    """So what is synchronised above is what would hang."""
    processes, parallel = LAYOUTS["PP2"]
    flags = [*model_flags(megatron_lm, "pretrain_gpt.py", ITERATIONS, []), *parallel, "--evenpipe-schedule", "1f1b"]
    run = launch(megatron_lm, SCRIPT, processes, [*flags, *TIMERS], {"POSTED_AHEAD": "1"}, check=False)
    assert run.returncode != 0
    assert "STANDS STILL: " in run.output
    assert run.lines == []
