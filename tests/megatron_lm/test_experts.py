"""Experts without a capacity, whose sizes differ from micro-batch to micro-batch, train to the bits of a stock run."""

import re
from pathlib import Path

import pytest

from tests.megatron_lm.launch import EXPERTS, LAYOUTS, differences, launch, model_flags

VARIANTS = {
    "BPipe": ("--bpipe",),
    "2F2B, BPipe": ("--evenpipe-schedule", "kfkb", "--group-size", "2", "--bpipe"),
}
ITERATIONS = 3
SCRIPTS = {"one length": "pretrain_gpt.py", "lengths that vary": str(Path(__file__).with_name("ragged_gpt.py"))}


def balancing(run):
    """Of each line; Megatron prints none that is 0."""
    return [sum(map(float, re.findall(r"load_balancing_loss: (\S+)", line))) for line in run.lines]


def test_experts_whose_messages_hide_behind_compute_train_to_the_same_bits(megatron_lm, tmp_path):
    """In Megatron's combined step (`--overlap-moe-expert-parallel-comm`), on more than one node of a layer at once."""
    _, parallel = LAYOUTS["PP4xVPP2"]
    flags = [*model_flags(megatron_lm, "pretrain_gpt.py", 2, []), *parallel, *EXPERTS, "--global-batch-size", "16"]
    flags += ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--bf16"]
    flags += ["--overlap-moe-expert-parallel-comm", "--save-interval", "2"]
    stock = launch(megatron_lm, "pretrain_gpt.py", 8, [*flags, "--save", str(tmp_path / "stock")])
    assert len(stock.lines) == 2
    run = launch(megatron_lm, "pretrain_gpt.py", 8, [*flags, "--bpipe", "--save", str(tmp_path / "BPipe")])
    assert run.lines == stock.lines
    assert run.validation == stock.validation
    last = "iter_0000002"
    assert differences(tmp_path / "stock" / last, tmp_path / "BPipe" / last) == []
    assert run.peak_live == [10, 10, 8, 8]


@pytest.mark.parametrize("lengths", [pytest.param("one length", marks=pytest.mark.long), "lengths that vary"])
def test_a_mixture_of_experts_trains_to_the_same_bits(megatron_lm, lengths, tmp_path):
    script = SCRIPTS[lengths]
    processes, parallel = LAYOUTS["PP4"]
    flags = [*model_flags(megatron_lm, "pretrain_gpt.py", ITERATIONS, []), *parallel, *EXPERTS]
    flags += ["--save-interval", str(ITERATIONS), "--ckpt-format", "torch"]
    stock = launch(megatron_lm, script, processes, [*flags, "--save", str(tmp_path / "stock")])
    assert len(stock.lines) == ITERATIONS
    assert all("load_balancing_loss" in line for line in stock.lines)
    # The first and the last stage load; what is in the middle only sees messages.
    assert sorted(re.findall(r"LENGTHS (\d+)", stock.output)) == (["0", "0", "5", "5"] if "vary" in lengths else [])
    last = f"iter_{ITERATIONS:07d}"
    for variant, ours in VARIANTS.items():
        run = launch(megatron_lm, script, processes, [*flags, *ours, "--save", str(tmp_path / variant)])
        assert run.lines == stock.lines, variant
        assert run.validation == stock.validation, variant
        assert differences(tmp_path / "stock" / last, tmp_path / variant / last) == [], variant
        assert run.peak_live == {"BPipe": [3, 3, 2, 3], "2F2B, BPipe": [6, 6, 4, 4]}[variant]
    # Each batch has its own auxiliary loss, an iteration later; the first two run on the same weights. What is
    # evaluated in between drops what had been forwarded. The second line would be a mean of two, of which the first is
    # not known yet, and leaves it out.
    run = launch(megatron_lm, script, processes, [*flags, "--evenpipe-schedule", "2bw", "--bpipe"])
    frozen = launch(megatron_lm, script, processes, [*flags, "--lr", "0", "--weight-decay", "0"])
    # The second line is a mean of two iterations.
    first, mean, _ = balancing(frozen)
    assert balancing(run) == [0, 0, pytest.approx(2 * mean - first)]
