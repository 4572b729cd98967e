"""Unmodified scripts under EvenPipe print the losses and gradient norms of stock runs and end with the same weights."""

import pytest

from tests.megatron_lm.conftest import CHECKOUTS
from tests.megatron_lm.launch import LAYOUTS, differences, launch, model_flags
from tests.selected import marked

ITERATIONS = 3
OURS, BPIPE = ("--evenpipe-schedule", "1f1b"), ("--bpipe",)
GROUPS = ("--evenpipe-schedule", "kfkb", "--group-size")
VARIANTS = {
    "PP2": {"EvenPipe's 1F1B": (OURS, [2, 1]), "BPipe": (BPIPE, [2, 1])},
    "PP4": {
        "EvenPipe's 1F1B": (OURS, [4, 3, 2, 1]),
        "BPipe": (BPIPE, [3, 3, 2, 3]),
        "2F2B": ((*GROUPS, "2"), [8, 6, 4, 2]),
        "2F2B, BPipe": ((*GROUPS, "2", "--bpipe"), [6, 6, 4, 4]),
    },
    "PP4xVPP2": {"BPipe": (BPIPE, [9, 9, 7, 7])},
    "DP2xPP2 distributed optimizer": {"EvenPipe's 1F1B": (OURS, [2, 1]), "3F3B": ((*GROUPS, "3"), [4, 3])},
    "DP2xPP4 distributed optimizer": {"BPipe": (BPIPE, [3, 3, 2, 2])},
    "TP2xPP4": {"BPipe": (BPIPE, [3, 3, 2, 3])},
}
"""Of each layout: flags, and the micro-batches (× chunks) that a stage holds, of eight (of four with two replicas)."""

EVERYWHERE = {
    *(("pretrain_gpt.py", layout) for layout in ("PP4", "PP4xVPP2", "DP2xPP2 distributed optimizer")),
    ("pretrain_bert.py", "PP4"),
}
REPEATED = {
    ("pretrain_gpt.py", "TP2xPP2"),
    *(("pretrain_bert.py", layout) for layout in ("PP2", "DP2xPP4 distributed optimizer", "TP2xPP2", "TP2xPP4")),
}
"""What shows nothing that another model, or a longer pipeline, does not."""

CASES = [
    pytest.param(script, layout, marks=pytest.mark.every_release if (script, layout) in EVERYWHERE else ())
    for script in ("pretrain_gpt.py", "pretrain_bert.py")
    for layout in LAYOUTS
    if (script, layout) not in REPEATED
]


def variants(checkout, script, layout):
    """All with one model and release; else the last, which has in it what the others have."""
    every = VARIANTS[layout]
    return every if script == "pretrain_gpt.py" and checkout == CHECKOUTS[0] else dict([[*every.items()][-1]])


@pytest.mark.parametrize(("script", "layout"), CASES)
def test_a_script_trains_to_the_same_bits(megatron_lm, script, layout, bert_data, tmp_path):
    if not (megatron_lm / script).exists():
        pytest.skip(f"{megatron_lm.name} has no {script}")
    processes, parallel = LAYOUTS[layout]
    flags = [*model_flags(megatron_lm, script, ITERATIONS, bert_data), *parallel, "--save-interval", str(ITERATIONS)]
    flags += ["--ckpt-format", "torch"]
    stock = launch(megatron_lm, script, processes, [*flags, "--save", str(tmp_path / "stock")])
    assert len(stock.lines) == ITERATIONS, stock.output[-4000:]
    assert all("lm loss" in line and "grad norm" in line for line in stock.lines)
    for variant, (ours, held) in variants(megatron_lm, script, layout).items():
        run = launch(megatron_lm, script, processes, [*flags, *ours, "--save", str(tmp_path / variant)])
        assert run.lines == stock.lines, variant
        assert len(stock.validation) >= 2
        assert run.validation == stock.validation, variant
        last = f"iter_{ITERATIONS:07d}"
        assert differences(tmp_path / "stock" / last, tmp_path / variant / last) == [], variant
        assert run.peak_live == held, variant


MIXTURES = {
    "bf16, full recomputation": (
        "PP4",
        ("--bf16", "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "bf16, attention recomputed, distributed optimizer": (
        "PP4",
        ("--bf16", "--recompute-granularity", "selective", "--use-distributed-optimizer"),
    ),
    "fp16, block recomputation": (
        "PP4",
        (
            *("--fp16", "--initial-loss-scale", "65536"),
            *("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"),
        ),
    ),
    "untied, uneven layout": (
        "PP4",
        (
            "--untie-embeddings-and-output-weights",
            *("--pipeline-model-parallel-layout", "Et|tt|ttt|ttL"),
        ),
    ),
    "virtual stages in groups of six": (
        "PP4xVPP2",
        # A group of six and one of four, of 13 units on the first stage.
        ("--microbatch-group-size-per-virtual-pipeline-stage", "6", "--global-batch-size", "10"),
    ),
}

ALIKE = ["bf16, full recomputation", "bf16, attention recomputed, distributed optimizer"]
"""What shows little that fp16 and block recomputation do not."""


@pytest.mark.parametrize("mixture", marked(MIXTURES, ALIKE))
def test_what_users_combine_trains_to_the_same_bits(megatron_lm, mixture):
    layout, more = MIXTURES[mixture]
    processes, parallel = LAYOUTS[layout]
    flags = [*model_flags(megatron_lm, "pretrain_gpt.py", ITERATIONS, []), *parallel, *more]
    stock = launch(megatron_lm, "pretrain_gpt.py", processes, flags)
    ours = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, "--bpipe"])
    assert len(stock.lines) == ITERATIONS
    assert ours.lines == stock.lines
    assert ours.validation == stock.validation
    assert ours.peak_live[0] == (11 if layout == "PP4xVPP2" else 3)
