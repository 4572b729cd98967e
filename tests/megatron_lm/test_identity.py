"""Unmodified scripts under EvenPipe print the losses and gradient norms of stock runs and end with the same weights."""

import pytest

from tests.megatron_lm.launch import LAYOUTS, differences, launch, model_flags

ITERATIONS = 3
VARIANTS = {"EvenPipe's 1F1B": ("--evenpipe-schedule", "1f1b"), "BPipe": ("--bpipe",)}
GROUPS = ("--evenpipe-schedule", "kfkb", "--group-size")
GROUPED = {
    ("pretrain_gpt.py", "PP4"): {"2F2B": (*GROUPS, "2"), "2F2B, BPipe": (*GROUPS, "2", "--bpipe")},
    ("pretrain_bert.py", "DP2xPP2 distributed optimizer"): {"3F3B": (*GROUPS, "3")},
}
HELD = {
    "PP4": {"EvenPipe's 1F1B": [4, 3, 2, 1], "BPipe": [3, 3, 2, 3], "2F2B": [8, 6, 4, 2], "2F2B, BPipe": [6, 6, 4, 4]},
    "DP2xPP2 distributed optimizer": {"3F3B": [4, 3]},
}
"""Micro-batches that a stage then holds, of eight (of four with two replicas)."""

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
    peaks = {}
    for variant, ours in (VARIANTS | GROUPED.get((script, layout), {})).items():
        run = launch(megatron_lm, script, processes, [*flags, *ours, "--save", str(tmp_path / variant)])
        assert run.lines == stock.lines, variant
        assert len(stock.validation) >= 2
        assert run.validation == stock.validation, variant
        last = f"iter_{ITERATIONS:07d}"
        assert differences(tmp_path / "stock" / last, tmp_path / variant / last) == [], variant
        peaks[variant] = run.peak_live
    held = {variant: wanted for variant, wanted in HELD.get(layout, {}).items() if variant in peaks}
    assert {variant: peaks[variant] for variant in held} == held
    # Two stages without virtual ones hold no more than the bound to begin with.
    assert (peaks["BPipe"][0] < peaks["EvenPipe's 1F1B"][0]) == ("PP4" in layout)


MIXTURES = {
    "bf16, full recomputation": (
        "PP4",
        ("--bf16", "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "bf16, attention recomputed, distributed optimizer": (
        "DP2xPP4 distributed optimizer",
        ("--bf16", "--recompute-granularity", "selective"),
    ),
    "fp16": ("PP4", ("--fp16", "--initial-loss-scale", "65536")),
    "untied, uneven layout": (
        "PP4",
        (
            "--untie-embeddings-and-output-weights",
            *("--pipeline-model-parallel-layout", "Et|tt|ttt|ttL"),
        ),
    ),
    "block recomputation": (
        "PP4",
        ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"),
    ),
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_what_users_combine_trains_to_the_same_bits(megatron_lm, mixture):
    layout, more = MIXTURES[mixture]
    processes, parallel = LAYOUTS[layout]
    flags = [*model_flags(megatron_lm, "pretrain_gpt.py", ITERATIONS, []), *parallel, *more]
    stock = launch(megatron_lm, "pretrain_gpt.py", processes, flags)
    ours = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, "--bpipe"])
    assert len(stock.lines) == ITERATIONS
    assert ours.lines == stock.lines
    assert ours.validation == stock.validation
    assert ours.peak_live[0] == 3
