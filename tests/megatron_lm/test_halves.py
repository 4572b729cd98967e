"""Backwards in two halves (`zb-h1`, `zb-h2`, `searched`) train what users combine to the bits of a stock run."""

import pytest

from tests.megatron_lm.launch import EXPERTS, LAYOUTS, differences, launch, model_flags

ITERATIONS = 3
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
CASES = {
    "sequence parallel": ("TP2xPP2", ("--bf16",)),
    "both overlaps": ("DP2xPP2 distributed optimizer", ("--bf16",)),
    "experts, both overlaps": (
        "DP2xPP2 distributed optimizer",
        ("--bf16", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", *EXPERTS),
    ),
    "multi-token prediction": ("PP2", ("--bf16", "--mtp-num-layers", "1", "--position-embedding-type", "rope")),
    "untied, uneven layout": (
        "PP4",
        ("--untie-embeddings-and-output-weights", "--pipeline-model-parallel-layout", "Et|tt|ttt|ttL"),
    ),
    "full recomputation, dropout": ("PP4", (*FULL, "--hidden-dropout", "0.1", "--attention-dropout", "0.1")),
    "attention recomputed, fp16": ("PP4", ("--fp16", "--recompute-granularity", "selective")),
}
SEARCHED = ("searched", "--memory-gib", "0.05")
"""Two iterations of zb-h1, and then by an order for their times."""
EVERYWHERE = ("sequence parallel", "both overlaps")
LONG = ("untied, uneven layout", "attention recomputed, fp16")
MARKED = [
    pytest.param(
        case,
        SEARCHED if case == "untied, uneven layout" else ("zb-h1",),
        marks=pytest.mark.every_release if case in EVERYWHERE else pytest.mark.long if case in LONG else (),
    )
    for case in CASES
]
MARKED += [
    pytest.param(case, schedule, marks=[pytest.mark.long, *([pytest.mark.every_release] if case in EVERYWHERE else [])])
    for case in ("multi-token prediction", *EVERYWHERE)
    for schedule in (("zb-h2",), SEARCHED)
]


@pytest.mark.parametrize(("case", "schedule"), MARKED)
def test_what_users_combine_trains_to_the_same_bits(megatron_lm, case, schedule, tmp_path):
    layout, more = CASES[case]
    processes, parallel = LAYOUTS[layout]
    flags = [*model_flags(megatron_lm, "pretrain_gpt.py", ITERATIONS, []), *parallel, *more]
    flags += ["--save-interval", str(ITERATIONS), "--ckpt-format", "torch"]
    stock = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, "--save", str(tmp_path / "stock")])
    assert len(stock.lines) == ITERATIONS
    zero = ["--evenpipe-schedule", *schedule, "--save", str(tmp_path / "halves")]
    ours = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, *zero])
    assert ours.lines == stock.lines
    assert len(stock.validation) >= 2
    assert ours.validation == stock.validation
    last = f"iter_{ITERATIONS:07d}"
    assert differences(tmp_path / "stock" / last, tmp_path / "halves" / last) == []
    if schedule == SEARCHED:
        assert "micro-batches: an order found in" in ours.output
    elif schedule == ("zb-h1",):
        stages = len(ours.peak_live)
        assert ours.peak_live == [stages] * stages
    else:
        assert max(ours.peak_live) == 2 * len(ours.peak_live) - 1
