"""Jobs whose data loaders have worker processes end, with Megatron's signal handler, which the workers inherit, too."""

import pytest

from tests.megatron_lm.launch import gpt_flags, launch

PP2, PP4 = (2, ["--pipeline-model-parallel-size", "2"]), (4, ["--pipeline-model-parallel-size", "4"])
SCHEDULES = {
    "1f1b": (*PP2, ["--evenpipe-schedule", "1f1b"]),
    "bpipe": (*PP4, ["--bpipe"]),
    "kfkb": (*PP2, ["--evenpipe-schedule", "kfkb", "--group-size", "2"]),
    "2bw": (*PP2, ["--evenpipe-schedule", "2bw"]),
}
WORKERS = ("--num-workers", "1", "--exit-signal-handler")
TIMEOUT_SECONDS = 300


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_job_with_loader_workers_ends(megatron_lm, name):
    """The interpreter waits for workers that are alive at its end, and these are deaf to what it sends them."""
    ranks, layout, flags = SCHEDULES[name]
    every = [*gpt_flags(2), *layout, *flags, *WORKERS]
    run = launch(megatron_lm, "pretrain_gpt.py", ranks, every, timeout=TIMEOUT_SECONDS)
    assert "after training is done" in run.output


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_job_with_loader_workers_ends_when_it_is_told_to(megatron_lm, name):
    ranks, layout, flags = SCHEDULES[name]
    every, second = [*gpt_flags(400), *layout, *flags, *WORKERS], " iteration        2/"
    run = launch(megatron_lm, "pretrain_gpt.py", ranks, every, timeout=TIMEOUT_SECONDS, signalled_at=second)
    assert "exiting program after receiving SIGTERM" in run.output
    assert len(run.lines) < 400
