"""A script trains with what was planned: whole layers as the same layout does, half layers as the uncut run does."""

import copy
import json
import re

import pytest

from evenpipe.descriptions import device
from evenpipe.layouts.plan import best_layout
from tests.megatron_lm.launch import differences, gpt_flags, launch

SCRIPT = "pretrain_gpt.py"
STOPS, ENDS = 2, 4
MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
UNTIED = ("--untie-embeddings-and-output-weights",)


@pytest.fixture
def checkout(megatron_lm):
    if megatron_lm.name >= "0.17":
        pytest.skip("needs a newer Python; releases before it are enough")
    return megatron_lm


def plan_for(flags, path, **more):
    """Written to `path`, with `more` in it; returns its layout."""
    plan, _ = best_layout(flags, device("a100-80gb"))
    document = plan.to_json() | more
    path.write_text(json.dumps(document))
    return document["layout"]


@pytest.mark.every_release
def test_a_planned_layout_trains_to_the_same_bits_as_the_layout_given(checkout, tmp_path):
    """Uneven, with tied embeddings and multi-token prediction, which Megatron saves together in its old format only."""
    flags = [*gpt_flags(2), "--pipeline-model-parallel-size", "2", *MTP, "--save-interval", "2"]
    flags += ["--ckpt-format", "torch"]
    layout = plan_for([str(checkout / SCRIPT), *flags], tmp_path / "P.json")
    parts = layout.split("|")
    assert parts[0].count("t") > parts[1].count("t")

    def train(folder, *more):
        return launch(checkout, SCRIPT, 2, [*flags, *more, "--save", str(tmp_path / folder)])

    stock = train("stock", "--pipeline-model-parallel-layout", layout)
    ours = train("ours", "--evenpipe-partition", str(tmp_path / "P.json"))
    assert ours.lines == stock.lines
    assert len(ours.lines) == 2
    assert differences(tmp_path / "stock" / "iter_0000002", tmp_path / "ours" / "iter_0000002") == []
    told = r"\[evenpipe\] stage \d \((\w+)\) .* predicted, .* measured \| peak MiB: .* predicted, .* measured"
    assert re.findall(told, ours.output) == parts


@pytest.mark.every_release
def test_a_stage_computes_as_many_layers_again_as_planned_and_no_bit_changes(checkout, tmp_path):
    """The first stage, which holds more micro-batches, does; it then saves less, by what was measured here."""
    flags = [*gpt_flags(2), "--pipeline-model-parallel-size", "2", *UNTIED]
    command = [str(checkout / SCRIPT), *flags]
    whole = best_layout(command)[0]
    limit = max(stage.peak_bytes for stage in whole.stages) * 9 // 10
    again = json.loads(json.dumps(best_layout(command, limit_bytes=limit, recompute=True)[0].to_json()))
    (tmp_path / "again.json").write_text(json.dumps(again))
    layers = [stage["recompute_layers"] for stage in again["stages"]]
    assert layers[0] > layers[1]
    kept = copy.deepcopy(again)
    for stage in kept["stages"]:
        stage["recompute_layers"] = 0
    (tmp_path / "kept.json").write_text(json.dumps(kept))

    runs = [
        launch(checkout, SCRIPT, 2, [*flags, "--evenpipe-partition", str(tmp_path / f"{name}.json")])
        for name in ("kept", "again")
    ]
    assert runs[0].lines == runs[1].lines
    assert len(runs[0].lines) == 2
    told = r"peak MiB: .* predicted, ([\d.,]+) measured"
    held = [[float(mib) for mib in re.findall(told, run.output)] for run in runs]
    fell = [before - after for before, after in zip(*held, strict=True)]
    one = next(layer for layer in again["layers"] if layer["symbols"] == "t")
    saves = (one["saved_bytes"] - one["input_bytes"]) / 2**20
    micro_batches = (2, 1)  # held at a time
    planned = [saves * count * copies for count, copies in zip(layers, micro_batches, strict=True)]
    assert fell == pytest.approx(planned, rel=0.03, abs=0.11)  # said to a tenth


@pytest.mark.every_release
def test_half_layers_train_as_whole_ones_and_checkpoints_are_the_same(checkout, tmp_path):
    """The middle stage begins and ends inside a layer; the last one has half a layer, MTP and loss.

    Without clipping, whose norm adds up in another order where parameters are on another stage.
    """
    flags = [*gpt_flags(ENDS), "--pipeline-model-parallel-size", "3", *MTP, *UNTIED, "--clip-grad", "0"]
    flags += ["--save-interval", str(STOPS)]
    layout = plan_for([str(checkout / SCRIPT), *flags], tmp_path / "P.json", layout="Ettttt|ttt|mL", halves=[1, 2])
    whole, cut = ("--pipeline-model-parallel-layout", layout), ("--evenpipe-partition", str(tmp_path / "P.json"))

    def train(folder, *more):
        return launch(checkout, SCRIPT, 3, [*flags, *more, "--save", str(tmp_path / folder)])

    uncut = train("whole", *whole)
    stopped = train("cut", *cut, "--exit-interval", str(STOPS))
    assert stopped.lines == uncut.lines[:STOPS]
    resumed = train("whole-cut", *cut, "--load", str(tmp_path / "whole"), "--ckpt-step", str(STOPS))
    assert len(resumed.lines) == ENDS - STOPS
    assert train("cut-whole", *whole, "--load", str(tmp_path / "cut")).lines == resumed.lines
    between, last = f"iter_{STOPS:07d}", f"iter_{ENDS:07d}"
    assert differences(tmp_path / "whole" / between, tmp_path / "cut" / between) == []
    for folder in ("whole-cut", "cut-whole"):
        assert differences(tmp_path / "whole" / last, tmp_path / folder / last) == [], folder
