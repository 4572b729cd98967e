"""`evenpipe run --estimate`: a script's own parser, no GPU, no process group, and what `evenpipe estimate` prints."""

import json
import sys

import pytest

from evenpipe.descriptions import cluster, model
from evenpipe.planner.estimate import estimate
from evenpipe.planner.run import Run
from tests.megatron_lm.launch import start

SIZES = (
    *("--num-layers", "80", "--hidden-size", "9984", "--num-attention-heads", "104", "--seq-length", "2048"),
    *("--max-position-embeddings", "2048", "--micro-batch-size", "2", "--global-batch-size", "128", "--fp16"),
    *("--tensor-model-parallel-size", "4", "--sequence-parallel", "--pipeline-model-parallel-size", "8"),
    *("--use-distributed-optimizer", "--recompute-granularity", "selective", "--train-iters", "3", "--lr", "1e-4"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "51199"),
)
CLUSTER = ("--cluster", "4x8-a100-80gb")


def told(megatron_lm, *flags, before=CLUSTER, environment=None):
    command = [sys.executable, "-m", "evenpipe", "run", "--estimate", *before, "pretrain_gpt.py", *SIZES, *flags]
    job = start(command, megatron_lm, environment)
    output, _ = job.communicate(timeout=800)
    return job.returncode, output


@pytest.mark.every_release
def test_the_document_is_that_of_the_run(megatron_lm):
    status, output = told(megatron_lm, "--transformer-impl", "local", "--bpipe", before=(*CLUSTER, "--json"))
    assert status == 0, output[-3000:]
    document = json.loads(output)
    assert document["format"] == "evenpipe.estimate/1"
    run = Run(
        global_batch=128,
        tensor=4,
        stages=8,
        micro_batch=2,
        recompute="selective",
        attention="unfused",
        precision="fp16",
        bpipe=True,
        gradients_in_fp32=False,
    )
    described = estimate(model("gpt3-96b"), cluster("4x8-a100-80gb"), run)
    for stage, same in zip(document["stages"], described.stages, strict=True):
        assert stage["bytes"]["total"] == same.bytes.total
        assert stage["forward_ms"] == pytest.approx(same.forward_ms)


def test_flags_without_effect_are_told_and_refused_ones_refused(megatron_lm):
    """Megatron's parser takes all of them; its layers refuse the second kind when they are built."""
    status, output = told(megatron_lm, "--fp8-recipe", "tensorwise", "--cuda-graph-scope", "attn")
    assert status == 0, output[-3000:]
    for option, needed in (("--fp8-recipe", "--fp8-format"), ("--cuda-graph-scope", "--cuda-graph-impl")):
        assert f"{option}: works only with {needed}; Megatron ignores it here" in output
    status, output = told(megatron_lm, "--fp8-param-gather")
    assert status == 2, output[-3000:]
    assert "--fp8-param-gather: works only with --fp8-format; Megatron refuses it here" in output


@pytest.mark.long
def test_what_does_not_fit_is_told_megatron_s_flag_to_change(megatron_lm):
    status, output = told(megatron_lm, before=())
    assert status == 0, output[-3000:]
    assert "on 4x8-a100-80gb:" in output
    assert "name --cluster 4x8-a100-80gb" in output, "what was taken for granted"
    assert "does not fit" in output
    assert "--bpipe, or give --recompute-granularity full" in output
    assert "building" not in output, "nothing of what Megatron prints"


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--no-such-flag", "3"), "unrecognized arguments: --no-such-flag 3"),
        (("--num-layers", "81"), "Number of layers should be divisible by"),
        (("--evenpipe-schedule", "gpipe", "--bpipe"), "--evenpipe-schedule gpipe"),
    ],
)
def test_what_megatron_or_evenpipe_refuses_is_one_line(megatron_lm, flags, said):
    status, output = told(megatron_lm, *flags)
    assert status == 2, output[-3000:]
    assert output.count("\n") == 1
    assert said in output


@pytest.mark.long
def test_experts_further_tokens_and_layouts(megatron_lm):
    flags = (
        *(
            "--num-layers",
            "16",
            "--hidden-size",
            "4096",
            "--num-attention-heads",
            "32",
            "--swiglu",
            "--num-experts",
            "8",
        ),
        *("--disable-bias-linear", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
        *("--moe-layer-freq", "([0]*1+[1]*15)", "--expert-model-parallel-size", "8", "--expert-tensor-parallel-size"),
        *("1", "--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Et|tt|tt|tt|ttt|tt|tt|ttmL"),
        *("--mtp-num-layers", "1"),
    )
    status, output = told(megatron_lm, *flags, before=("--cluster", "8x8-h100", "--json"))
    assert status == 0, output[-3000:]
    stages = json.loads(output)["stages"]
    assert len(stages) == 4
    assert stages[3]["bytes"]["weights"] > 1.2 * stages[1]["bytes"]["weights"], "the further token's layer is there"
