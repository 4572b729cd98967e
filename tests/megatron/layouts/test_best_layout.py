"""From flags to a layout: measured on this CPU, or by a device's peaks."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from evenpipe.descriptions import device
from evenpipe.layouts.gpt import LayoutError
from evenpipe.layouts.measured import measured
from evenpipe.layouts.plan import best_layout
from evenpipe.layouts.search import moves
from evenpipe.layouts.split import Problem
from evenpipe.megatron_lm.layout_model import read
from evenpipe.partition.profile import Profile

SMALL = (
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--micro-batch-size", "2", "--global-batch-size", "16", "--max-position-embeddings", "64"),
    *("--pipeline-model-parallel-size", "4", "--vocab-size", "1000"),
)
LARGE_VOCABULARY = ("--vocab-size", "40000")
EXPERTS = (
    *("--num-experts", "4", "--moe-layer-freq", "([0]*3+[1]*5)", "--moe-ffn-hidden-size", "64"),
    *("--moe-router-topk", "2", "--disable-bias-linear", "--swiglu", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
)
BIASED_EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "64", "--max-position-embeddings", "128")
MTP = ("--mtp-num-layers", "2")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")


@pytest.mark.parametrize(
    "flags",
    [
        (*LARGE_VOCABULARY, *EXPERTS, *MTP),
        *(
            pytest.param(flags, marks=pytest.mark.long)
            for flags in (LARGE_VOCABULARY, EXPERTS, MTP, (*LARGE_VOCABULARY, *VIRTUAL), (*EXPERTS, *TENSOR, "--bf16"))
        ),
    ],
    ids=" ".join,
)
def test_by_the_measured_profile_no_even_split_and_no_move_away_is_faster(flags):
    plan, profile = best_layout([*SMALL, *flags])
    problem = Problem(plan.layers, plan.pipeline, mtp_apart=True)
    lengths = [sum(len(stage) for stage in part.split("|")) for part in plan.layout.split("|")]
    assert plan.source == "measured on this CPU"
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 and layer.saved_bytes > 0 for layer in plan.layers)
    assert math.isclose(sum(node.forward_ms for node in profile.nodes), sum(layer.forward_ms for layer in plan.layers))
    assert sum(one.nbytes for one in profile.storages) == sum(layer.saved_bytes for layer in plan.layers)
    assert {"embedding", "layers.0.qkv", "layers.0.fc1", "layers.7.end", "loss"} <= {
        node.name for node in profile.nodes
    }
    assert sum(node.cut_allowed for node in profile.nodes) == len(plan.layers) - 1
    assert sum(lengths) == 10 + ("--mtp-num-layers" in flags) * 2
    forward, backward, _ = problem.weighed(moves(problem, cuts_of(plan)))
    assert plan.best.max_stage_ms <= min(plan.even.max_stage_ms, (forward + backward).max(axis=1).min())


def cuts_of(plan):
    """Of the layout's text, in which MTP layers count as one."""
    row = [len(part.replace("mm", "m")) for part in plan.layout.split("|")]
    return tuple(sum(row[: part + 1]) for part in range(len(row) - 1))


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [(*EXPERTS, *MTP, *TENSOR), (*BIASED_EXPERTS, *MTP), ()], ids=["experts, MTP, TP 2", "biases", "dense"]
)
def test_parameters_are_those_of_megatrons_own_model(flags):
    script = Path(__file__).with_name("count_parameters.py")
    done = subprocess.run([sys.executable, script, *SMALL, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, expected = json.loads(done.stdout.splitlines()[-1])
    assert found == expected


def test_by_a_devices_peaks_nothing_is_run():
    """The output layer of 128,256 tokens takes as long as several layers: the last stage has fewer."""
    big = ("--hidden-size", "4096", "--num-attention-heads", "32", "--num-layers", "32", "--seq-length", "4096")
    wide = ("--vocab-size", "128256", "--max-position-embeddings", "4096", "--bf16")
    plan, profile = best_layout([*SMALL, *big, *wide], device("a100-80gb"), limit_bytes=80 * 2**30)
    assert plan.source == "estimated"
    assert plan.layout.count("t") == 32
    assert plan.layout.split("|")[-1].count("t") < 8
    assert plan.best.max_stage_ms < 0.95 * plan.even.max_stage_ms
    named = {node.name: node for node in profile.nodes}
    assert named["layers.31.qkv"].parameter_bytes == 2 * (4096 + 1) * 3 * 4096
    assert [one.users for one in profile.parameters if one.name == "word_embeddings"] == [(0, len(named) - 2)]
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    assert plan.to_json()["format"] == "evenpipe.layout/1"
    assert json.loads(json.dumps(plan.to_json()))["layout"] == plan.layout


def test_a_model_that_is_too_large_for_this_cpu_needs_a_device():
    _, gpt, _ = read([*SMALL, "--hidden-size", "12288", "--num-attention-heads", "96", "--seq-length", "2048"], None)
    with pytest.raises(LayoutError, match="cannot be timed on this CPU"):
        measured(gpt, build=lambda: pytest.fail("it was built"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--pipeline-model-parallel-layout", "Et|t|t|tL"), "already lays the layers out"),
        (("--decoder-first-pipeline-num-layers", "1"), "already lays the layers out"),
        (("--no-such-flag",), "--no-such-flag: not among the flags"),
        (("--hidden-size", "wide"), "--hidden-size: 'wide' is no whole number"),
        (("--num-experts", "4", "--moe-layer-freq", "[0,1]"), "2 entries for 8 layers"),
        (("--num-experts", "4", "--moe-layer-freq", "print()"), "neither a number nor a list"),
        (("--num-layers-per-virtual-pipeline-stage", "3"), "say --num-virtual-stages-per-pipeline-rank"),
        (("--global-batch-size", "3"), "no multiple of --micro-batch-size 2"),
    ],
)
def test_flags_for_which_there_is_no_layout(flags, message):
    with pytest.raises(LayoutError) as raised:
        read([*SMALL, *flags], None)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_missing_is_named():
    with pytest.raises(LayoutError, match="--vocab-size: not given"):
        read(SMALL[:-2], None)
    with pytest.raises(LayoutError, match=r"nowhere/pretrain_gpt\.py: no such script"):
        read(["nowhere/pretrain_gpt.py", *SMALL], None)
